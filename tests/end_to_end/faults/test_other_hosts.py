"""A node of two launchers that are killed, each with a rank."""

from __future__ import annotations

import contextlib
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tandem.tests.end_to_end.support.cluster import START_SECONDS, TestCluster, running, until


def free_port() -> int:
    """The first of two free ports."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return port


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_that_is_killed_ends_the_whole_node(
    tmp_path: Path, tiny_model: str, victim: int
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    flags = [tiny_model, "--threads=1", "--tp=2", "--nnodes=2", "--master-addr=127.0.0.1"]
    flags += [f"--master-port={free_port()}", f"--cluster-token-file={token}"]
    with running(tmp_path, tiny_model) as cluster:
        parts = [
            cluster.launch(["decode-node", *flags, f"--node-rank={number}"]) for number in (0, 1)
        ]
        for part in parts:
            part.wait_ready()
        ranks = [
            child
            for part in parts
            for child in psutil.Process(part.process.pid).children(recursive=True)
        ]
        assert len(ranks) >= 2
        parts[victim].process.send_signal(signal.SIGKILL)
        other = parts[1 - victim]
        assert other.process.wait(START_SECONDS) == 1
        *_, last = other.log.read_text().splitlines()
        assert last.startswith(
            ("tandem: the head at 127.0.0.1:", "tandem: rank 1 of node rank 1 (127.0.0.1) ")[victim]
        )
        until(lambda: not any(map(runs, ranks)), "the ranks to end")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode-node", "--nnodes=2", "--master-addr=127.0.0.1"], "needs a cluster token"),
        (["decode-node", "--nnodes=2", "--tp=3", "--master-addr=h"], "cannot be divided among"),
        (["serve", "--nnodes=2", "--master-addr=127.0.0.1"], "needs a cluster token"),
        (
            ["serve", "--nnodes=2", "--master-addr=h", "--prefill-nodes=1"],
            "--nnodes 2 divides one node, but",
        ),
        (["chat", "--nnodes=2"], "It is an option of tandem prefill-node, decode-node, serve."),
        (["router", "--node-rank=1"], "It is an option of tandem prefill-node, decode-node, serve"),
    ],
)
def test_wrong_usage_is_refused_before_anything_starts(
    tmp_path: Path, tiny_model: str, arguments: list[str], message: str
) -> None:
    command, *flags = arguments
    model = [] if command == "router" else [tiny_model]
    with running(tmp_path, tiny_model) as cluster:
        part = TestCluster.launch(cluster, [command, *model, *flags])
        assert part.process.wait(START_SECONDS) == 2
        (line,) = part.log.read_text().splitlines()
        assert message in line, line
