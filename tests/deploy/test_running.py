"""The parts of the manifests, run with the arguments and the environment that kustomize builds.

They run in a place that is as narrow as their containers, with the names of their services in
``/etc/hosts`` and an address for each pod: two routers, a prefill node and a decode node.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme

from tandem.tests.support.extent import selected

from . import deployment as d
from .place import USER, contained, impossible
from .test_documents import inline

ADDRESSES = {
    "tandem-router-0": "10.99.0.10",
    "tandem-router-1": "10.99.0.11",
    "tandem-prefill-0": "10.99.0.20",
    "tandem-decode-0": "10.99.0.30",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not d.KUBECTL, reason=d.NO_KUBECTL),
]


def pods(objects: list[d.Object]) -> dict[str, d.Container]:
    """Each of the pods above as one that has the machine to itself but for its address."""
    containers = {}
    for workload in d.servers(objects):
        name = workload["metadata"]["name"]
        (part,) = d.kubernetes_parts(objects, workload)
        for pod in ADDRESSES:
            if pod.rpartition("-")[0] == name:
                arguments = [each.replace("0.0.0.0", ADDRESSES[pod]) for each in part.arguments]
                environment = part.environment | {"TANDEM_THREADS": "1"}
                containers[pod] = d.Container(pod, tuple(arguments), environment)
    assert containers.keys() == ADDRESSES.keys()
    return containers


def hosts(objects: list[d.Object], folder: Path) -> Path:
    services = {
        workload["metadata"]["name"]: workload["spec"]["serviceName"]
        for workload in d.servers(objects)
    }
    lines = [
        f"{address} {pod}.{services[pod.rpartition('-')[0]]}" for pod, address in ADDRESSES.items()
    ]
    hosts_file = folder / "hosts"
    hosts_file.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
    return hosts_file


def run(objects: list[d.Object], folder: Path, files: dict[str, Path]) -> dict[str, Any]:
    parts = pods(objects)
    router = ADDRESSES["tandem-router-1"]
    commands: list[dict[str, Any]] = [
        {"arguments": shlex.split(line), "environment": parts["tandem-router-0"].environment}
        for line in sorted(set(inline(r"tandem-router-0 -- tandem ((?:nodes|doctor)\b[^`\n]*)")))
        if " role " not in line
    ]
    # A pod's loopback leads to what listens on 0.0.0.0; here each listens on its address alone.
    for command in commands:
        own = ADDRESSES["tandem-router-0"]
        command["arguments"] = [a.replace("127.0.0.1", own) for a in command["arguments"]]
        if "--router" not in command["arguments"]:
            command["arguments"] += ["--router", f"{own}:8001"]
    task = {
        "parts": {
            pod: {"arguments": part.arguments, "environment": part.environment}
            for pod, part in parts.items()
        },
        "ready": [
            f"http://{ADDRESSES[pod]}:{8000 if part.command == 'router' else 8080}/ready"
            for pod, part in parts.items()
        ],
        "completions": f"http://{router}:8000/v1/completions",
        "body": json.dumps({"model": "tandem-builtin", "prompt": "Hello! " * 40, "max_tokens": 4}),
        "commands": commands,
        "pages": [f"http://{address}:8080/metrics" for address in ADDRESSES.values()],
    }
    assert len(commands) == 2
    root = folder / "root"
    root.mkdir()
    contained_command = contained(
        [sys.executable, str(Path(__file__).with_name("supervise.py"))],
        root,
        files=files | {"/etc/hosts": hosts(objects, folder)},
        addresses=tuple(ADDRESSES.values()),
    )
    done = subprocess.run(
        contained_command, input=json.dumps(task), capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    assert "error" not in report, f"{report['error']}\n" + "\n".join(report["logs"].values())
    return report


def lock(folder: Path) -> Path:
    """The content of the lock's secrets, readable by the pods' group."""
    secrets = folder / "lock"
    secrets.mkdir()
    authority = trustme.CA()
    certificate = authority.issue_cert("tandem")
    (secrets / "tls.crt").write_bytes(b"".join(c.bytes() for c in certificate.cert_chain_pems))
    (secrets / "tls.key").write_bytes(certificate.private_key_pem.bytes())
    (secrets / "ca.crt").write_bytes(authority.cert_pem.bytes())
    (secrets / "token").write_text("0123456789abcdef0123456789abcdef\n")
    for path in secrets.iterdir():
        os.chown(path, 0, USER)
        path.chmod(0o440)
    return secrets


@pytest.mark.parametrize("name", selected(["kubernetes-locked"], full=["kubernetes"]))
def test_the_manifests_serve(name: str, tmp_path: Path) -> None:
    (tmp_path / "try").mkdir()
    if reason := impossible(tmp_path / "try", addresses=("10.99.0.1",)):
        pytest.skip(f"no private namespaces: {reason}")
    files = {"/lock": lock(tmp_path)} if "locked" in name else {}
    report = run(d.build(d.DEPLOY / name), tmp_path, files)
    assert report["text"]
    for command in report["commands"]:
        assert command["code"] == 0, command["out"]
    nodes, page = report["commands"][-1]["out"], "".join(report["pages"])
    assert "tandem-decode-0" in nodes and "tandem-prefill-0" in nodes
    assert "tandem_nodes{" in page and "tandem_sequences_running" in page
    open_doors = [log for log in report["logs"].values() if "--insecure" in log]
    assert len(open_doors) == (0 if files else len(ADDRESSES))


def test_a_part_without_its_secrets_does_not_start(tmp_path: Path) -> None:
    """Its volume would keep the pod from starting; should that ever fail, this does not."""
    (tmp_path / "try").mkdir()
    if reason := impossible(tmp_path / "try", addresses=("10.99.0.1",)):
        pytest.skip(f"no private namespaces: {reason}")
    part = pods(d.build(d.DEPLOY / "kubernetes-locked"))["tandem-decode-0"]
    unlocked = {k: v for k, v in part.environment.items() if not k.startswith("TANDEM_TLS")}
    unlocked.pop("TANDEM_CLUSTER_TOKEN_FILE")
    root = tmp_path / "root"
    root.mkdir()
    variables = [f"{name}={value}" for name, value in unlocked.items()]
    command = ["env", *variables, sys.executable, "-m", "tandem", *part.arguments]
    done = subprocess.run(
        contained(command, root, addresses=tuple(ADDRESSES.values())),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and "reachable from other machines" in done.stderr
