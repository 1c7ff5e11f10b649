"""The objects that kustomize builds of ``deploy/``, checked against our commands and each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.shared.config import EngineConfig
from tandem.shared.config.command_line import fill

from . import deployment as d

pytestmark = pytest.mark.skipif(not d.KUBECTL, reason=d.NO_KUBECTL)

NAMES = [*d.OVERLAYS, *(f"+{name}" for name in d.OPTIONAL)]
INSTANCE = "app.kubernetes.io/instance"


@pytest.fixture(scope="module", params=NAMES)
def manifests(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[d.Object]:
    """Each overlay, and the base with each component that no overlay has."""
    name: str = request.param
    if not name.startswith("+"):
        return d.build(d.DEPLOY / name)
    components = [f"components/{name[1:]}"]
    folder = tmp_path_factory.mktemp("component")
    return d.kustomize(folder, resources=["kubernetes"], components=components)


@pytest.fixture
def base() -> list[d.Object]:
    return d.build(d.DEPLOY / "kubernetes")


@pytest.fixture(params=NAMES)
def prefixed(request: pytest.FixtureRequest, tmp_path: Path) -> list[d.Object]:
    """A second model in the same namespace, as README.md says it is made, of each overlay and
    component."""
    name: str = request.param
    component = name.startswith("+")
    return d.kustomize(
        tmp_path,
        resources=["kubernetes" if component else name],
        components=[f"components/{name[1:]}"] if component else [],
        namePrefix="qwen-",
        labels=[{"pairs": {INSTANCE: "qwen-tandem"}, "includeSelectors": True}],
    )


def containers(objects: list[d.Object]) -> Iterator[tuple[d.Object, d.Object, d.Container]]:
    """Workload, container and part."""
    for workload in d.servers(objects):
        parts = d.kubernetes_parts(objects, workload)
        for container, part in zip(d.pod(workload)["containers"], parts, strict=True):
            yield workload, container, part


# --- arguments


def test_every_flag_and_variable_is_one_the_command_takes(manifests: list[d.Object]) -> None:
    for _, _, part in containers(manifests):
        part.parse()
        flags = {argument.partition("=")[0] for argument in part.arguments[1:]}
        # click takes unambiguous beginnings of flags too: those break when another flag is added.
        assert flags <= d.options_of(part.command), part.where


def test_every_part_listens_where_others_reach_it(manifests: list[d.Object]) -> None:
    for _, container, part in containers(manifests):
        options = part.parse()
        assert options["host"] == "0.0.0.0"
        assert options.get("registry_host", "0.0.0.0") == "0.0.0.0"
        assert set(d.ports(container).values()) == part.ports, part.where


def test_the_router_serves_the_model_of_its_nodes_and_no_other(manifests: list[d.Object]) -> None:
    models = {part.parse()["model"] for _, _, part in containers(manifests)}
    assert len(models) == 1


def test_ports_of_one_pod_differ(manifests: list[d.Object]) -> None:
    for workload in d.servers(manifests):
        port_maps = [d.ports(container) for container in d.pod(workload)["containers"]]
        numbers = [number for ports in port_maps for number in ports.values()]
        names = [name for ports in port_maps for name in ports]
        assert len({*numbers}) == len(numbers) and len({*names}) == len(names)


# --- names


def check_names(objects: list[d.Object]) -> None:
    services = d.named(objects, "Service")
    pods = {
        f"{workload['metadata']['name']}-{number}.{workload['spec']['serviceName']}": workload
        for workload in d.servers(objects)
        for number in range(workload["spec"]["replicas"])
    }
    routers = {
        name for name, workload in pods.items() if d.labels(workload)["tandem/part"] == "router"
    }
    for workload, _, part in containers(objects):
        if part.command == "router":
            continue
        options = part.parse()
        first = f"{workload['metadata']['name']}-0.{workload['spec']['serviceName']}"
        assert options["advertise"] == f"{first}:{options['port']}"
        joins = dict(address.rsplit(":", 1) for address in options["join"].split(","))
        # Every router, or the clients of one would see no nodes.
        assert joins.keys() == routers
        for name, port in joins.items():
            headless = services[name.partition(".")[2]]["spec"]
            assert headless["clusterIP"] == "None"
            # A router is ready only after nodes have joined it.
            assert headless["publishNotReadyAddresses"]
            assert int(port) in [each["port"] for each in headless["ports"]]


def check_references(objects: list[d.Object]) -> None:
    """What pods name exists, besides secrets and the volume of models, which are made apart."""
    for workload in d.servers(objects):
        pod = d.pod(workload)
        references = {
            ("ConfigMap", source["configMapRef"]["name"])
            for container in pod["containers"]
            for source in container["envFrom"]
        }
        for claim in pod.get("resourceClaims", ()):
            references.add(("ResourceClaimTemplate", claim["resourceClaimTemplateName"]))
        if "priorityClassName" in pod:
            references.add(("PriorityClass", pod["priorityClassName"]))
        assert references <= {(item["kind"], item["metadata"]["name"]) for item in objects}


def test_nodes_advertise_and_join_names_that_resolve(manifests: list[d.Object]) -> None:
    check_names(manifests)
    check_references(manifests)


def test_a_second_model_in_the_namespace_has_names_of_its_own(
    prefixed: list[d.Object], base: list[d.Object]
) -> None:
    check_names(prefixed)
    check_references(prefixed)
    own = {(item["kind"], item["metadata"]["name"]) for item in prefixed}
    assert not own & {(item["kind"], item["metadata"]["name"]) for item in base}
    for item in d.of_kind(prefixed, "Service", "NetworkPolicy", "PodDisruptionBudget"):
        spec = item["spec"]
        selector = spec.get("podSelector") or spec["selector"]
        labels = selector.get("matchLabels", selector)
        assert labels[INSTANCE] == "qwen-tandem"
        for rule in spec.get("ingress", ()):
            for peer in rule.get("from", ()):
                assert peer["podSelector"]["matchLabels"][INSTANCE] == "qwen-tandem"


def test_services_lead_to_a_port_that_is_listened_on(manifests: list[d.Object]) -> None:
    for service in d.of_kind(manifests, "Service"):
        (workload,) = d.selected(manifests, {"matchLabels": service["spec"]["selector"]})
        listened: dict[str, int] = {}
        for container in d.pod(workload)["containers"]:
            listened |= d.ports(container)
        for port in service["spec"]["ports"]:
            assert listened[port["targetPort"]] == port["port"]


def test_pods_advertise_names_of_services_that_outlive_readiness(manifests: list[d.Object]) -> None:
    for workload in d.servers(manifests):
        service = d.named(manifests, "Service")[workload["spec"]["serviceName"]]["spec"]
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
        assert d.matches({"matchLabels": service["selector"]}, d.labels(workload))


# --- probes and ends


def test_probes_ask_what_their_comments_say(manifests: list[d.Object]) -> None:
    for _, container, part in containers(manifests):
        probes = {
            name: (container[name]["httpGet"]["path"], container[name]["httpGet"]["port"])
            for name in ("startupProbe", "livenessProbe", "readinessProbe")
            if name in container
        }
        ports = d.ports(container)
        # Of a router, not the clients' port: they may fill it, and it would be restarted for that.
        apart = "metrics" if part.command == "router" else next(p for p in ports if "health" in p)
        options = part.parse()
        assert (
            ports[apart] == options["metrics_port" if part.command == "router" else "health_port"]
        )
        assert probes.pop("startupProbe") == probes.pop("livenessProbe") == ("/health", apart)
        door = "http" if part.command == "router" else apart
        assert probes == {"readinessProbe": ("/ready", door)}


def test_pods_outlive_their_drain(manifests: list[d.Object]) -> None:
    for workload, _, part in containers(manifests):
        options = part.parse()
        longest = options["drain_timeout"] + options.get("shutdown_delay", 0)
        assert d.pod(workload)["terminationGracePeriodSeconds"] >= longest + 30, part.where
        # A response may take minutes, and `tandem nodes role` can make a prefill node decode too.
        assert options["drain_timeout"] >= 600
        if part.command == "router":
            assert options["shutdown_delay"] >= 10, "longer than endpoints take to be told"


# --- what pods may do


def test_pods_meet_the_restricted_standard_that_the_namespace_enforces(
    manifests: list[d.Object],
) -> None:
    (namespace,) = d.documents(d.DEPLOY / "namespace.yaml")
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert level == "restricted"
    for workload in d.workloads([*manifests, *d.build(d.DEPLOY / "download")]):
        pod = d.pod(workload)
        assert pod["automountServiceAccountToken"] is False
        # A service named tandem would put TANDEM_PORT=tcp://... into every pod.
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostPID", "hostIPC", "hostNetwork", "initContainers"} & pod.keys()
        kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "projected", "secret", "persistentVolumeClaim", "image"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_pods_ask_for_what_they_use(manifests: list[d.Object]) -> None:
    for workload, container, _ in containers(manifests):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory", "ephemeral-storage"} <= requests.keys()
        assert {"memory", "ephemeral-storage"} <= limits.keys()
        disk = [v["emptyDir"] for v in d.pod(workload)["volumes"] if "emptyDir" in v]
        assert all("sizeLimit" in volume for volume in disk)
        on_disk = sum(size(v["sizeLimit"]) for v in disk if v.get("medium") != "Memory")
        assert on_disk <= size(limits["ephemeral-storage"])
        in_memory = sum(size(v["sizeLimit"]) for v in disk if v.get("medium") == "Memory")
        assert in_memory <= size(limits["memory"]) / 4


def size(text: str) -> int:
    units = {"Mi": 1 << 20, "Gi": 1 << 30}
    return int(text[:-2]) * units[text[-2:]]


def test_mounts_and_volumes_fit(manifests: list[d.Object]) -> None:
    for workload, container, _ in containers(manifests):
        claims = workload["spec"].get("volumeClaimTemplates", ())
        volumes = {v["name"] for v in d.pod(workload)["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in claims}
        mounts = container["volumeMounts"]
        assert {mount["name"] for mount in mounts} == volumes
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        # The images write to these two; the rest of the file system is read-only.
        assert {"/tmp", "/cache"} <= {mount["mountPath"] for mount in mounts}


def test_pods_of_a_kind_are_spread(manifests: list[d.Object]) -> None:
    for workload in d.servers(manifests):
        rules = d.pod(workload)["topologySpreadConstraints"]
        assert {rule["topologyKey"] for rule in rules} == {
            "kubernetes.io/hostname",
            "topology.kubernetes.io/zone",
        }
        for rule in rules:
            assert d.selected(manifests, rule["labelSelector"]) == [workload]
        # One after the other would take as many starts as there are pods.
        assert workload["spec"]["podManagementPolicy"] == "Parallel"


def test_disruption_budgets_keep_a_pod_of_each_kind(manifests: list[d.Object]) -> None:
    covered = []
    for budget in d.of_kind(manifests, "PodDisruptionBudget"):
        (workload,) = d.selected(manifests, budget["spec"]["selector"])
        assert budget["spec"]["maxUnavailable"] < workload["spec"]["replicas"]
        covered.append(workload["metadata"]["name"])
    assert sorted(covered) == sorted(w["metadata"]["name"] for w in d.servers(manifests))


# --- who may call whom


def admitted(objects: list[d.Object]) -> dict[tuple[str, int], set[str]]:
    """By policy and first port, the parts that may connect; ``*`` is everybody."""
    allowed: dict[tuple[str, int], set[str]] = {}
    for policy in d.of_kind(objects, "NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            peers = [
                workload
                for peer in rule.get("from", ())
                for workload in d.selected(objects, peer["podSelector"])
            ]
            who = {d.labels(w)["tandem/part"] for w in peers} if "from" in rule else {"*"}
            for port in rule["ports"]:
                key = (policy["metadata"]["name"], port["port"])
                allowed[key] = allowed.get(key, set()) | who
    return allowed


def test_network_policies_admit_the_required_pods_only(base: list[d.Object]) -> None:
    assert admitted(base) == {
        ("tandem-router", 8000): {"*"},
        ("tandem-router", 8001): {"node"},
        # Requests, state for the doctor and roles from routers; transfers from other nodes.
        ("tandem-node", 8100): {"router", "node"},
        ("tandem-node", 8200): {"node"},
    }


def test_policies_select_what_a_change_of_role_leaves_alone(manifests: list[d.Object]) -> None:
    """A node keeps its pod's labels when it changes its role, so no policy may select by role."""
    policies = d.of_kind(manifests, "NetworkPolicy")
    assert "app.kubernetes.io/component" not in str(policies)
    covered = {
        workload["metadata"]["name"]
        for policy in policies
        for workload in d.selected(manifests, policy["spec"]["podSelector"])
    }
    assert covered == {workload["metadata"]["name"] for workload in d.servers(manifests)}


def test_every_node_has_ports_for_kv_that_others_reach(manifests: list[d.Object]) -> None:
    (policy,) = [
        p for p in d.of_kind(manifests, "NetworkPolicy") if p["metadata"]["name"] == "tandem-node"
    ]
    ranges = [
        range(port["port"], port.get("endPort", port["port"]) + 1)
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
    ]
    for _, _, part in containers(manifests):
        if part.command == "router":
            continue
        options = part.parse()
        assert options["kv_port"], f"{part.where} could not be a prefill node"
        eight_ranks = range(options["kv_port"], options["kv_port"] + 16)
        assert any(set(eight_ranks) <= set(each) for each in ranges)
        assert any(options["port"] in each for each in ranges)


# --- locked


def test_nothing_is_open_where_the_lock_is_on() -> None:
    for name in ("kubernetes-locked", "kubernetes-gpu", "kubernetes-pair"):
        objects = d.build(d.DEPLOY / name)
        for workload, container, part in containers(objects):
            options = part.parse()
            assert options["insecure"] is False, "a part without its secrets must not listen"
            assert not [a for a in part.arguments if a.startswith("--insecure")]
            (lock,) = [v for v in d.pod(workload)["volumes"] if v["name"] == "lock"]
            items = {
                item["path"]: source["secret"]["name"]
                for source in lock["projected"]["sources"]
                for item in source["secret"]["items"]
            }
            # A volume whose item is missing keeps the pod from starting, unless it is optional.
            assert "optional" not in str(lock)
            (mount,) = [m for m in container["volumeMounts"] if m["name"] == "lock"]
            files = [options[f"tls_{kind}"] for kind in ("cert", "key", "ca")]
            files.append(options["cluster_token_file"])
            assert {Path(file).name for file in files} == items.keys()
            assert {str(Path(file).parent) for file in files} == {mount["mountPath"]}
            # Without subPath, files change in a running pod when the secret does.
            assert mount["readOnly"] and "subPath" not in mount
            assert options["tls_name"] == "tandem"


def test_open_parts_have_the_insecure_option(base: list[d.Object]) -> None:
    assert all(part.parse()["insecure"] for _, _, part in containers(base))


# --- GPUs


@pytest.mark.parametrize("name", ["kubernetes-gpu", "kubernetes-pair", "kubernetes-hosts"])
def test_nodes_on_gpus_have_what_they_need(name: str) -> None:
    objects = d.build(d.DEPLOY / name)
    for workload, container, part in containers(objects):
        resources, mounts = container["resources"], container["volumeMounts"]
        if part.command == "router":
            assert "nvidia" not in str(workload) and "cuda" not in container["image"]
            continue
        assert container["image"].endswith("-cuda") and part.parse()["device"] == "cuda"
        assert resources["limits"].get("nvidia.com/gpu") == "1" or resources["claims"]
        assert size(resources["limits"]["memory"]) >= 16 << 30
        assert "/dev/shm" in [mount["mountPath"] for mount in mounts]
        assert "nvidia.com/gpu" in [each["key"] for each in d.pod(workload)["tolerations"]]
        assert part.parse()["threads"] == int(resources["limits"]["cpu"])


def test_a_pair_sees_each_other_and_both_gpus() -> None:
    objects = d.build(d.DEPLOY / "kubernetes-pair")
    (pair,) = [w for w in d.servers(objects) if d.labels(w)["tandem/part"] == "node"]
    decode, prefill = d.kubernetes_parts(objects, pair)
    assert [decode.command, prefill.command] == ["decode-node", "prefill-node"]
    assert d.pod(pair)["shareProcessNamespace"] is True
    one, other = d.pod(pair)["containers"]
    assert one["resources"] == other["resources"] and one["volumeMounts"] == other["volumeMounts"]
    assert {decode.parse()["devices"], prefill.parse()["devices"]} == {"0", "1"}
    assert decode.parse()["node_id"] != prefill.parse()["node_id"]
    claims = {claim["name"] for claim in d.pod(pair)["resourceClaims"]}
    assert {claim["name"] for claim in one["resources"]["claims"]} == claims


def test_a_node_on_several_hosts_is_a_group_of_pods_that_start_and_end_together() -> None:
    objects = d.build_exactly(d.DEPLOY / "kubernetes-hosts")
    (group,) = d.of_kind(objects, d.LEADER_WORKER_SET)
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert group["spec"].keys() == {"replicas", "leaderWorkerTemplate"}
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    # The service has the group's name, as the one that the controller would make.
    assert group["metadata"]["name"] in d.named(objects, "Service")
    as_stateful = d.build(d.DEPLOY / "kubernetes-hosts")
    (workload,) = [w for w in d.servers(as_stateful) if "prefill" in w["metadata"]["name"]]
    (part,) = d.kubernetes_parts(as_stateful, workload)
    values = part.parse()
    assert (values["nnodes"], values["node_rank"]) == (template["size"], 0)
    assert values["master_addr"].startswith(f"{group['metadata']['name']}-0.")
    config = fill(EngineConfig, values)
    assert config.ranks_per_host == 1
    # Not of every part: only what ranks of one node exchange is open, to its hosts.
    others = [p for w in d.servers(as_stateful) for p in d.kubernetes_parts(as_stateful, w)]
    assert [p.command for p in others if p.parse()["insecure"]] == ["prefill-node"]
    policy = d.named(objects, "NetworkPolicy")["tandem-hosts"]["spec"]
    assert d.selected(as_stateful, policy["podSelector"]) == [workload]
    (rule,) = policy["ingress"]
    assert [d.selected(as_stateful, peer["podSelector"]) for peer in rule["from"]] == [[workload]]
    assert "ports" not in rule


# --- options


def test_a_change_of_options_replaces_pods(tmp_path: Path, base: list[d.Object]) -> None:
    changed = d.kustomize(
        tmp_path,
        resources=["kubernetes"],
        configMapGenerator=[
            {"name": "tandem", "behavior": "merge", "literals": ["TANDEM_MAX_MODEL_LEN=512"]}
        ],
    )
    assert d.named(changed, "ConfigMap").keys() != d.named(base, "ConfigMap").keys()
    for _, container, part in containers(changed):
        assert part.environment["TANDEM_MAX_MODEL_LEN"] == "512"
        (source,) = container["envFrom"]
        assert source["configMapRef"]["name"] in d.named(changed, "ConfigMap")
