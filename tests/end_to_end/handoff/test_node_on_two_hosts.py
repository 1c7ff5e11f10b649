"""A prefill node with a rank on each of two machines, and a decode node and the router on a
third."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tandem.tests.end_to_end.handoff import hosts
from tandem.tests.end_to_end.handoff.campaign import LENGTH, RECEIVED, ask, reference
from tandem.tests.end_to_end.handoff.hosts import Switch, three_hosts
from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import (
    BLOCK,
    CHUNK,
    CONTEXT,
    START_SECONDS,
    Part,
    TestCluster,
    get,
    node_metric,
    running,
    until,
)

PROBLEM = hosts.problem()
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)

HEAD, OTHER, DECODE = (f"{hosts.NETWORK}{number}" for number in (1, 2, 3))
FLAGS = ["--insecure", "--carrier=tcp", "--dtype=float32", "--threads=1", f"--block-size={BLOCK}"]
FLAGS += [f"--max-model-len={CONTEXT}", f"--max-num-batched-tokens={CHUNK}"]
FLAGS += ["--prefill-threshold=1", "--no-enable-prefix-caching", f"--join={DECODE}:8001"]


@dataclass
class Machines:
    cluster: TestCluster
    switch: Switch
    head: Part
    other: Part
    decode: Part


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("hosts")
    token = folder / "token"
    token.write_text("secret")
    flags = [*FLAGS, f"--cluster-token-file={token}"]
    with three_hosts() as (switch, on), running(folder, tiny_model) as cluster:
        routing = ["router", f"--host={DECODE}", f"--registry-host={DECODE}", "--insecure"]
        routing += ["--port=8000", "--registry-port=8001", f"--cluster-token-file={token}"]
        cluster.router = cluster.launch(routing, DECODE, prelude=on[DECODE])
        cluster.router.wait_ready()
        prefill = ["prefill-node", tiny_model, "--host=0.0.0.0", *flags]
        prefill += ["--tp=2", "--nnodes=2", f"--master-addr={HEAD}"]
        nodes = [
            cluster.launch([*prefill, "--node-rank=0"], HEAD, prelude=on[HEAD]),
            cluster.launch([*prefill, "--node-rank=1", "--headless"], OTHER, prelude=on[OTHER]),
            cluster.launch(
                ["decode-node", tiny_model, "--host=0.0.0.0", *flags], DECODE, prelude=on[DECODE]
            ),
        ]
        for node in nodes:
            node.wait_ready()
        cluster.wait_nodes(decode=1, prefill=1)
        yield Machines(cluster, switch, *nodes)


def test_each_rank_hands_over_its_part_from_its_own_host(
    machines: Machines, aggregated: TestCluster
) -> None:
    tokens = prompt(3, LENGTH)
    result = ask(machines.cluster, tokens)
    assert (result.tokens, result.error) == (reference(aggregated, tokens), "")
    assert node_metric(machines.decode, RECEIVED) == 1
    assert machines.switch._num_bytes[OTHER, DECODE] > 10_000  # half of the KV


def test_a_host_without_the_head_has_probes(machines: Machines) -> None:
    port = machines.other.health_port()
    assert get(f"http://{OTHER}:{port}/health") and get(f"http://{OTHER}:{port}/ready")


def test_a_cut_between_the_hosts_ends_both_and_leaves_nothing_running(machines: Machines) -> None:
    """Neither side is told: no packet arrives any more."""
    pids = [machines.head.process.pid, machines.other.process.pid]
    ranks = [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    assert len(ranks) >= 2
    machines.switch.cut = {frozenset((HEAD, OTHER))}
    statuses = [part.process.wait(START_SECONDS) for part in (machines.head, machines.other)]
    assert statuses == [1, 1]
    head, other = machines.head.log.read_text(), machines.other.log.read_text()
    assert f"tandem: rank 1 of node rank 1 ({OTHER}) " in head
    assert f"tandem: the head at {HEAD}:29501 is gone" in other
    until(lambda: not any(map(_runs, ranks)), "the ranks to end")
    # The decode node prefills itself.
    assert not ask(machines.cluster, prompt(4, LENGTH)).error


def _runs(process: psutil.Process) -> bool:
    return os.path.exists(f"/proc/{process.pid}") and process.status() != psutil.STATUS_ZOMBIE
