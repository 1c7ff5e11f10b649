"""Killed processes and vanished clients: every request gets its answer or one clean error, and
what survives holds nothing afterwards and serves the next request."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tandem.router.cluster import admin
from tandem.tests.end_to_end.support.clients import greedy, open_request, prompt, stream_lines
from tandem.tests.end_to_end.support.cluster import (
    Part,
    TestCluster,
    committed_transfers,
    is_ready,
    node_metric,
    running,
    tandem,
    until,
)

# Without prefix caches, every prompt is computed and handed over again.
FORGETFUL = "--no-enable-prefix-caching"
# The head of a node that asks its ranks for signs of life four times as often.
IMPATIENT = "from tandem.shared.engine import executor; executor.PING_SECONDS /= 4"


class MendedPair:
    """A prefill node and a decode node. What one test ends is started again for the next."""

    def __init__(self, cluster: TestCluster) -> None:
        self._cluster = cluster
        self._parts: dict[str, Part] = {}

    @property
    def prefill(self) -> Part:
        return self._parts["prefill-node"]

    @property
    def decode(self) -> Part:
        return self._parts["decode-node"]

    def mend(self) -> None:
        """Wait until both serve, and the router knows no other node."""
        parts, kinds = self._parts, ("prefill-node", "decode-node")
        missing = [k for k in kinds if k not in parts or parts[k].process.poll() is not None]
        nodes = self._cluster.start_nodes(*((kind, FORGETFUL) for kind in missing))
        self._parts |= zip(missing, nodes, strict=True)
        self._cluster.wait_parts(*self._parts.values())

    def replace_decode(self, prelude: str) -> None:
        """By one that runs ``prelude`` first."""
        self.decode.process.terminate()
        assert self.decode.process.wait(20) == 0
        self._parts["decode-node"] = self._cluster.launch_node("decode-node", prelude=prelude)
        self.decode.wait_ready()
        self.mend()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[TestCluster]:
    with running(tmp_path_factory.mktemp("faults"), tiny_model) as cluster:
        cluster.start_router()
        yield cluster


@pytest.fixture(scope="module")
def shared_pair(cluster: TestCluster) -> MendedPair:
    return MendedPair(cluster)


@pytest.fixture
def pair(shared_pair: MendedPair) -> MendedPair:
    shared_pair.mend()
    return shared_pair


def test_a_prefill_node_may_be_killed_before_during_and_after_transfers(
    cluster: TestCluster, pair: MendedPair
) -> None:
    decode, before = pair.decode, committed_transfers(pair.decode)
    want = {seed: greedy(cluster, seed) for seed in range(4)}
    assert committed_transfers(decode) == before + 4

    # During: requests are under way while it dies.
    with ThreadPoolExecutor(8) as pool:
        under_way = [pool.submit(greedy, cluster, seed % 4) for seed in range(16)]
        until(lambda: under_way[0].done(), "the first response")
        pair.prefill.kill()
        for index, future in enumerate(under_way):
            assert future.result() == want[index % 4]

    # The router may have learned of it already, or not yet.
    assert greedy(cluster, 1) == want[1]
    cluster.wait_idle(decode)
    # The decode node does, however many requests were under way.
    assert decode.log.read_text().count("lost rank 0 of node") == 1

    # It comes back as another process, and is used again.
    cluster.wait_nodes(decode=1, prefill=0)
    pair.mend()
    before = committed_transfers(decode)
    assert greedy(cluster, 2) == want[2]
    assert committed_transfers(decode) == before + 1
    cluster.wait_idle(decode, pair.prefill)


def test_a_stopped_prefill_node_delays_requests_but_fails_none(
    cluster: TestCluster, pair: MendedPair
) -> None:
    want = greedy(cluster, 5)
    pair.prefill.process.send_signal(signal.SIGSTOP)
    try:
        assert greedy(cluster, 5) == want
    finally:
        pair.prefill.process.send_signal(signal.SIGCONT)
    cluster.wait_idle(pair.prefill, pair.decode)


def test_a_killed_decode_node_loses_only_its_own_requests(
    cluster: TestCluster, pair: MendedPair
) -> None:
    want = greedy(cluster, 6)
    # Sixteen choices, so that the stream cannot have ended before the kill.
    lines = stream_lines(cluster, prompt(6, 20), pair.decode.kill, max_tokens=400, n=16)
    errors = [line for line in lines if '"error"' in line]
    assert len(errors) == 1 and lines[-1] == errors[0], lines[-3:]
    status, body = cluster.post("/v1/completions", {"prompt": prompt(6), "max_tokens": 1})
    assert status == 503 and body["error"]["message"], body

    cluster.wait_nodes(decode=0, prefill=1)  # the dead one must not be counted below
    pair.mend()
    assert greedy(cluster, 6) == want
    cluster.wait_idle(pair.prefill, pair.decode)


def test_an_idle_node_whose_rank_dies_leaves_at_once(
    cluster: TestCluster, pair: MendedPair
) -> None:
    (rank,) = psutil.Process(pair.prefill.process.pid).children()
    rank.kill()
    assert pair.prefill.process.wait(10) == 1
    assert "rank 0 was killed (SIGKILL)" in pair.prefill.log.read_text().splitlines()[-1]
    cluster.wait_nodes(decode=1, prefill=0)
    listing = tandem("nodes", "--router", cluster.registry).stdout
    reason = r"rank 0 was killed \(SIGKILL\), possibly for lack of memory"
    assert re.search(rf"\nprefill node prefill-\S+ left \d+ s ago: {reason}", listing)
    assert cluster.router is not None
    log = cluster.router.log.read_text()
    assert re.search(rf"WARNING tandem.router prefill node prefill-\S+ ends: {reason}", log)
    greedy(cluster, 8)
    cluster.wait_idle(pair.decode)


def test_a_node_whose_rank_hangs_ends_its_streams_with_one_error_and_leaves(
    cluster: TestCluster, pair: MendedPair
) -> None:
    """Its head is well, and so are its heartbeats."""
    pair.replace_decode(IMPATIENT)
    decode = pair.decode
    (rank,) = psutil.Process(decode.process.pid).children()
    lines = stream_lines(cluster, prompt(9, 20), rank.suspend, max_tokens=450, n=4)
    errors = [line for line in lines if '"error"' in line]
    assert len(errors) == 1 and lines[-1] == errors[0]
    rank.kill()  # sooner than its head would
    assert decode.process.wait(10) == 1
    reason = "rank 0 gave no sign of life for 2.5 s"
    assert reason in decode.log.read_text().splitlines()[-1]
    last = admin.list_nodes(cluster.registry).absent[-1]
    assert last.failed and last.reason.startswith(reason)


def test_nodes_join_a_restarted_router_again(cluster: TestCluster, pair: MendedPair) -> None:
    want = greedy(cluster, 7)
    old = cluster.router
    assert old is not None
    old.kill()
    cluster.start_router(http=old.details["http"], registry=old.details["registry"])
    cluster.wait_nodes(decode=1, prefill=1)
    assert greedy(cluster, 7) == want
    cluster.wait_idle(pair.prefill, pair.decode)


def test_a_drained_node_finishes_its_streams(cluster: TestCluster, pair: MendedPair) -> None:
    lines = stream_lines(
        cluster,
        prompt(9, 20),
        lambda: pair.decode.process.send_signal(signal.SIGTERM),
        max_tokens=200,
    )
    assert lines[-1] == "data: [DONE]"
    assert pair.decode.process.wait(10) == 0
    assert pair.prefill.process.poll() is None


def test_an_operator_can_drain_a_node_by_name(cluster: TestCluster, pair: MendedPair) -> None:
    name = re.search(r"INFO .*?(prefill-\S+) listens on", pair.prefill.log.read_text())
    assert name, pair.prefill.log.read_text()
    under_way: list[str] = stream_lines(
        cluster,
        prompt(9, 20),
        lambda: tandem(
            "nodes", f"--router={cluster.registry}", "drain", name[1]
        ).check_returncode(),
        max_tokens=200,
    )
    assert under_way[-1] == "data: [DONE]"
    assert pair.prefill.process.wait(10) == 0
    cluster.wait_nodes(decode=1, prefill=0)
    greedy(cluster, 9)
    cluster.wait_idle(pair.decode)


def test_one_prefill_node_serves_two_decode_nodes_and_the_reverse(
    cluster: TestCluster, pair: MendedPair
) -> None:
    more = cluster.start_nodes(("prefill-node", FORGETFUL), ("decode-node", FORGETFUL))
    cluster.wait_nodes(decode=2, prefill=2)
    nodes = (pair.prefill, pair.decode, *more)
    before = [committed_transfers(part) for part in nodes[1::2]]
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda i: greedy(cluster, i % 4), range(24)))
    assert all(outputs[i] == outputs[i % 4] for i in range(24))
    after = [committed_transfers(part) for part in nodes[1::2]]
    increments = [now - then for now, then in zip(after, before, strict=True)]
    assert min(increments) > 0 and sum(increments) == 24
    cluster.wait_idle(*nodes)
    for part in more:
        part.process.terminate()
        assert part.process.wait(10) == 0


def test_a_second_sigterm_ends_a_draining_node_and_its_ranks_at_once(
    cluster: TestCluster, pair: MendedPair
) -> None:
    node = pair.decode
    ranks = psutil.Process(node.process.pid).children()
    connection = open_request(cluster, prompt(1, 20), stream=True, max_tokens=450, n=16)
    until(lambda: node_metric(node, "tandem_sequences_running") == 16, "the streams")
    node.process.send_signal(signal.SIGTERM)
    until(lambda: not is_ready(node), "the node to be unready")
    assert node.process.poll() is None
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(10) == 143
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    connection.close()
