"""A decode node dies with requests on it: what no client has seen yet goes on elsewhere."""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tandem.tests.end_to_end.support.clients import open_request, prompt, stream_lines
from tandem.tests.end_to_end.support.cluster import Part, TestCluster, node_metric, running, until

CHOICES = 4
# Long enough that no kill comes too late.
SEEDED = {
    "max_tokens": 250,
    "n": CHOICES,
    "temperature": 1.0,
    "seed": 5,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[TestCluster]:
    with running(tmp_path_factory.mktemp("failover"), tiny_model) as cluster:
        cluster.start_router()
        yield cluster


@pytest.fixture(scope="module")
def nodes(cluster: TestCluster) -> dict[str, Part]:
    """The decode nodes; what the last test kills is not there again."""
    names = ("decode-a", "decode-b")
    parts = cluster.start_nodes(*(("decode-node", f"--node-id={name}") for name in names))
    return dict(zip(names, parts, strict=True))


def generating(nodes: dict[str, Part]) -> str:
    """Waits until all choices run on one of the nodes: they part ways with the first token."""
    busy: list[str] = []

    def look() -> bool:
        counts = {
            name: node_metric(node, "tandem_sequences_running") for name, node in nodes.items()
        }
        busy[:] = [name for name, count in counts.items() if count == CHOICES]
        return bool(busy)

    until(look, "the first token")
    return busy[0]


def test_a_stream_leaves_a_silent_node_before_its_first_output_and_ends_after_it(
    cluster: TestCluster, nodes: dict[str, Part]
) -> None:
    cluster.wait_nodes(decode=2, prefill=0)
    tokens = prompt(2, 150)
    # A prompt of this length has a home, so it is known whom it goes to.
    (home,) = cluster.complete(tokens, max_tokens=1)["tandem"]["decode_nodes"]
    cluster.wait_idle(*nodes.values())
    silent, (left,) = nodes[home], [node for name, node in nodes.items() if name != home]
    try:
        silent.process.send_signal(signal.SIGSTOP)
        lines = stream_lines(cluster, tokens, max_tokens=8)
        assert lines[-1] == "data: [DONE]" and not any('"error"' in line for line in lines)

        cluster.wait_nodes(decode=1, prefill=0)
        stop = functools.partial(left.process.send_signal, signal.SIGSTOP)
        lines = stream_lines(cluster, tokens, stop, max_tokens=350, n=CHOICES)
        errors = [line for line in lines if '"error"' in line]
        assert len(errors) == 1 and lines[-1] == errors[0]
    finally:
        for node in nodes.values():
            node.process.send_signal(signal.SIGCONT)
    # They come back, and hold nothing of what was given up.
    cluster.wait_nodes(decode=2, prefill=0)
    cluster.wait_idle(*nodes.values())


def test_a_unary_request_survives_its_decode_node_and_is_refused_without_another(
    cluster: TestCluster, nodes: dict[str, Part]
) -> None:
    prefill = cluster.start_node("prefill-node")
    cluster.wait_nodes(decode=2, prefill=1)
    tokens = prompt(1, 150)
    want = cluster.complete(tokens, **SEEDED)
    cluster.wait_idle(*nodes.values())

    left = dict(nodes)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(cluster.complete, tokens, **SEEDED)
        left.pop(generating(left)).kill()
        got = answer.result()
    assert got["choices"] == want["choices"]
    assert got["usage"]["completion_tokens"] == want["usage"]["completion_tokens"]
    assert got["tandem"]["decode_nodes"] == list(left)

    cluster.wait_nodes(decode=1, prefill=1)
    connection = open_request(cluster, tokens, **SEEDED)
    # Its head survives its rank for a moment, and says so itself.
    (rank,) = psutil.Process(left.pop(generating(left)).process.pid).children()
    rank.kill()
    refusal = connection.getresponse()
    assert refusal.status == 503
    assert int(refusal.headers["retry-after"]) >= 1
    assert json.loads(refusal.read())["error"]["code"] == "unavailable"
    connection.close()
    cluster.wait_idle(prefill)
