"""Killed processes and vanished clients: every request gets its answer or one clean error, and
what survives holds nothing afterwards and serves the next request."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.tests.end_to_end.clients import greedy, prompt, stream_lines
from tandem.tests.end_to_end.cluster import Part, TestCluster, node_metric, running, until


@pytest.fixture
def cluster(folder: Path, tiny_model: str) -> Any:
    with running(folder, tiny_model) as cluster:
        cluster.start_router()
        yield cluster


def pair(cluster: TestCluster) -> tuple[Part, Part]:
    # Without a prefix cache on the decode node, every prompt is a new transfer and the prefill
    # node answers repeated ones from its own cache.
    prefill, decode = cluster.start_nodes(
        ("prefill-node",), ("decode-node", "--no-enable-prefix-caching")
    )
    cluster.wait_nodes(decode=1, prefill=1)
    return prefill, decode


def test_a_prefill_node_may_be_killed_before_during_and_after_transfers(
    cluster: TestCluster,
) -> None:
    prefill, decode = pair(cluster)
    want = {seed: greedy(cluster, seed) for seed in range(4)}
    assert node_metric(decode, 'tandem_transfers_total{outcome="committed"}') == 4

    # During: requests are under way while it dies.
    with ThreadPoolExecutor(8) as pool:
        under_way = [pool.submit(greedy, cluster, seed % 4) for seed in range(16)]
        until(lambda: under_way[0].done(), "the first answer")
        prefill.kill()
        for index, future in enumerate(under_way):
            assert future.result() == want[index % 4]

    # After, which is also before: nobody has told the router yet, or somebody has.
    assert greedy(cluster, 1) == want[1]
    cluster.wait_idle(decode)

    # It comes back as another process, and is used again.
    cluster.wait_nodes(decode=1, prefill=0)
    cluster.start_node("prefill-node")
    cluster.wait_nodes(decode=1, prefill=1)
    before = node_metric(decode, 'tandem_transfers_total{outcome="committed"}')
    assert greedy(cluster, 2) == want[2]
    assert node_metric(decode, 'tandem_transfers_total{outcome="committed"}') == before + 1
    cluster.wait_idle(decode, cluster.parts[-1])


def test_a_stopped_prefill_node_costs_seconds_not_answers(cluster: TestCluster) -> None:
    prefill, decode = pair(cluster)
    want = greedy(cluster, 5)
    prefill.process.send_signal(signal.SIGSTOP)
    try:
        assert greedy(cluster, 5) == want
    finally:
        prefill.process.send_signal(signal.SIGCONT)
    cluster.wait_idle(prefill, decode)


def test_a_killed_decode_node_loses_only_its_own_requests(cluster: TestCluster) -> None:
    prefill, decode = pair(cluster)
    want = greedy(cluster, 6)
    # Sixteen choices, so that the stream cannot have ended before the kill.
    lines = stream_lines(cluster, prompt(6, 20), decode.kill, max_tokens=400, n=16)
    errors = [line for line in lines if '"error"' in line]
    assert len(errors) == 1 and lines[-1] == errors[0], lines[-3:]
    status, body = cluster.post("/v1/completions", {"prompt": prompt(6), "max_tokens": 1})
    assert status == 503 and body["error"]["message"], body

    cluster.wait_nodes(decode=0, prefill=1)  # the dead one must not be counted below
    other = cluster.start_node("decode-node")
    cluster.wait_nodes(decode=1, prefill=1)
    assert greedy(cluster, 6) == want
    cluster.wait_idle(prefill, other)


def test_an_idle_node_whose_rank_dies_leaves_at_once(cluster: TestCluster) -> None:
    prefill, decode = pair(cluster)
    (rank,) = psutil.Process(prefill.process.pid).children()
    rank.kill()
    assert prefill.process.wait(10) == 1
    assert "rank 0 ended with exit status -9" in prefill.log.read_text().splitlines()[-1]
    cluster.wait_nodes(decode=1, prefill=0)
    greedy(cluster, 8)
    cluster.wait_idle(decode)


def test_a_node_whose_rank_stands_still_ends_its_streams_with_one_error_and_leaves(
    cluster: TestCluster,
) -> None:
    """Its head is well, and so are its heartbeats."""
    decode = cluster.start_node("decode-node")
    cluster.wait_nodes(decode=1, prefill=0)
    (rank,) = psutil.Process(decode.process.pid).children()
    lines = stream_lines(cluster, prompt(9, 20), rank.suspend, max_tokens=450, n=4)
    errors = [line for line in lines if '"error"' in line]
    assert len(errors) == 1 and lines[-1] == errors[0]
    rank.kill()  # sooner than its head would
    assert decode.process.wait(10) == 1
    assert "rank 0 gave no sign of life for 10 s" in decode.log.read_text().splitlines()[-1]


def test_nodes_join_a_restarted_router_again(cluster: TestCluster) -> None:
    prefill, decode = pair(cluster)
    want = greedy(cluster, 7)
    old = cluster.router
    assert old is not None
    old.kill()
    cluster.start_router(http=old.details["http"], registry=old.details["registry"])
    cluster.wait_nodes(decode=1, prefill=1)
    assert greedy(cluster, 7) == want
    cluster.wait_idle(prefill, decode)


def test_a_drained_node_finishes_its_streams(cluster: TestCluster) -> None:
    prefill, decode = pair(cluster)
    lines = stream_lines(
        cluster,
        prompt(9, 20),
        lambda: decode.process.send_signal(signal.SIGTERM),
        max_tokens=200,
    )
    assert lines[-1] == "data: [DONE]"
    assert decode.process.wait(10) == 0
    assert prefill.process.poll() is None


def test_an_operator_can_drain_a_node_by_name(cluster: TestCluster) -> None:
    prefill, decode = pair(cluster)
    router = cluster.router
    assert router is not None
    name = re.search(r"INFO .*?(prefill-\S+) is ready", prefill.log.read_text())
    assert name, prefill.log.read_text()
    command = [sys.executable, "-m", "tandem", "nodes"]
    command.append(f"--router=127.0.0.1:{router.details['registry']}")
    under_way: list[str] = stream_lines(
        cluster,
        prompt(9, 20),
        lambda: subprocess.run([*command, "drain", name[1]], check=True, timeout=60),
        max_tokens=200,
    )
    assert under_way[-1] == "data: [DONE]"
    assert prefill.process.wait(10) == 0
    cluster.wait_nodes(decode=1, prefill=0)
    greedy(cluster, 9)
    cluster.wait_idle(decode)


def test_one_prefill_node_serves_two_decode_nodes_and_the_reverse(cluster: TestCluster) -> None:
    kinds = ("prefill-node", "prefill-node", "decode-node", "decode-node")
    cluster.start_nodes(*((kind, "--no-enable-prefix-caching") for kind in kinds))
    cluster.wait_nodes(decode=2, prefill=2)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: greedy(cluster, i % 4), range(24)))
    assert all(answers[i] == answers[i % 4] for i in range(24))
    used = [
        node_metric(part, 'tandem_transfers_total{outcome="committed"}')
        for part in cluster.parts[3:]
    ]
    assert min(used) > 0 and sum(used) == 24
    cluster.wait_idle(*cluster.parts[1:])
