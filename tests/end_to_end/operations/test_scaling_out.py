"""A cluster with more work than it can do gets another prefill node, restarts and replaces it."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import Part, TestCluster, node_metric, running, until

# So many sequences run at once on the decode node; the other clients wait.
SEQUENCES, CLIENTS = 4, 12
DONE = 'tandem_transfers_total{outcome="done"}'
PASSED = 'tandem_canaries_total{outcome="passed"}'


@contextmanager
def overload(cluster: TestCluster, decode: Part) -> Iterator[None]:
    """Clients of which most wait at any time; each asks again when it has its answer. Fails if one
    of them got none."""
    seeds, enough = itertools.count(), threading.Event()

    def client() -> None:
        while not enough.is_set():
            cluster.complete(prompt(next(seeds), 400), max_tokens=24, ignore_eos=True)

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client) for _ in range(CLIENTS)]
        try:
            until(lambda: waiting(decode) > CLIENTS // 2, "a queue")
            yield
        finally:
            enough.set()
        for each in clients:
            each.result(60)


def waiting(decode: Part) -> float:
    return node_metric(decode, "tandem_sequences_waiting")


def test_a_prefill_node_joins_restarts_and_is_replaced_under_overload(
    tmp_path: Path, tiny_model: str
) -> None:
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router()
        first, decode = cluster.start_nodes(
            ("prefill-node", "--node-id=p1"), ("decode-node", f"--max-num-seqs={SEQUENCES}")
        )
        cluster.wait_parts(first, decode)
        with overload(cluster, decode):
            until(lambda: node_metric(first, DONE) > 0, "the first node to prefill")
            node = joining(cluster, decode)
            for other in ((), ("--block-size=32", "--max-num-batched-tokens=32")):
                node.process.send_signal(signal.SIGTERM)
                assert node.process.wait(30) == 0
                node = joining(cluster, decode, *other)
        cluster.wait_idle(decode, node)


def joining(cluster: TestCluster, decode: Part, *flags: str) -> Part:
    """A prefill node, once it has prefilled for a decode node that has a queue."""
    before = node_metric(decode, PASSED)
    node = cluster.start_node("prefill-node", "--node-id=p2", *flags)
    until(lambda: node_metric(node, DONE) > 0, "the new node to prefill")
    assert waiting(decode) > 0
    assert node_metric(decode, PASSED) == before + 1
    return node
