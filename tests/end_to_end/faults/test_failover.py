"""A decode node dies with requests on it: another one continues them, and no client sees it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil
import pytest

from tandem.tests.end_to_end.support.clients import open_request, prompt, stream_lines
from tandem.tests.end_to_end.support.cluster import (
    Part,
    TestCluster,
    get,
    metric,
    node_metric,
    running,
    until,
)

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

# Of reasoning: most of an output.
BUDGET = 200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[TestCluster]:
    with running(tmp_path_factory.mktemp("failover"), tiny_model) as cluster:
        cluster.start_router("--reasoning-parser=deepseek_r1")
        yield cluster


@pytest.fixture(scope="module")
def nodes(cluster: TestCluster) -> dict[str, Part]:
    """The decode nodes; what the last test kills is not there again."""
    names = ("decode-a", "decode-b")
    flags = ("--drain-timeout=1",)
    parts = cluster.start_nodes(*(("decode-node", f"--node-id={name}", *flags) for name in names))
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


def test_a_stream_leaves_a_silent_node_and_ends_with_the_last(
    cluster: TestCluster, nodes: dict[str, Part]
) -> None:
    cluster.wait_nodes(decode=2, prefill=0)
    tokens = prompt(2, 150)
    # A prompt of this length has a home, so it is known whom it goes to.
    (home,) = cluster.complete(tokens, max_tokens=1)["tandem"]["decode_nodes"]
    cluster.wait_idle(*nodes.values())
    silent, (other,) = nodes[home], [node for name, node in nodes.items() if name != home]
    try:
        silent.process.send_signal(signal.SIGSTOP)
        lines = stream_lines(cluster, tokens, max_tokens=8)
        assert lines[-1] == "data: [DONE]" and not any('"error"' in line for line in lines)

        cluster.wait_nodes(decode=1, prefill=0)
        stop = partial(other.process.send_signal, signal.SIGSTOP)
        lines = stream_lines(cluster, tokens, stop, max_tokens=350, n=CHOICES)
        errors = [line for line in lines if '"error"' in line]
        assert len(errors) == 1 and lines[-1] == errors[0]
    finally:
        for node in nodes.values():
            node.process.send_signal(signal.SIGCONT)
    # They come back, and hold nothing of what was given up.
    cluster.wait_nodes(decode=2, prefill=0)
    cluster.wait_idle(*nodes.values())


def test_a_budget_of_reasoning_holds_on_the_node_that_takes_over(
    cluster: TestCluster, nodes: dict[str, Part]
) -> None:
    cluster.wait_nodes(decode=2, prefill=0)
    body = SEEDED | {
        "messages": [{"role": "user", "content": "Think."}],
        "thinking_token_budget": BUDGET,
    }
    status, want = cluster.post("/v1/chat/completions", body)
    assert status == 200, want
    cluster.wait_idle(*nodes.values())

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(cluster.post, "/v1/chat/completions", body)
        name = generating(nodes)
        nodes[name].kill()
        _, response = future.result()
    assert response["tandem"]["decode_nodes"] == [name, *(nodes.keys() - {name})]
    assert response["choices"] == want["choices"]
    # Not those of the prompt, which may be in the cache of the node that is left.
    for count in ("completion_tokens", "completion_tokens_details"):
        assert response["usage"][count] == want["usage"][count]
    # Each token is a byte: the budget, the rest of a character, and the marker.
    reasoning = response["usage"]["completion_tokens_details"]["reasoning_tokens"] / CHOICES
    assert BUDGET <= reasoning <= BUDGET + 3 + len("</think>")
    for choice in response["choices"]:
        assert choice["message"]["reasoning"] and choice["message"]["content"]
    nodes[name] = cluster.start_node("decode-node", f"--node-id={name}")


STREAMED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    # The seed is the router's, as for the undisturbed request it is the client's.
    "seeded choices": {"temperature": 1.0, "seed": 3, "n": 3},
    "penalties and logprobs": {"temperature": 0, "frequency_penalty": 0.5, "logprobs": 2},
    "a grammar": {"structured_outputs": {"regex": "([a-z]{3} ){80}"}, "seed": 1},
}


def whole(lines: list[str]) -> tuple[dict[int, list[int]], int]:
    """The tokens of each choice of a stream that has ended well, and all of them in its usage."""
    assert lines[-1] == "data: [DONE]", lines[-1]
    tokens: dict[int, list[int]] = {}
    usage = 0
    for event in (json.loads(line.removeprefix("data: ")) for line in lines[:-1]):
        for choice in event["choices"]:
            tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
        usage = (event.get("usage") or {}).get("completion_tokens", 0)
    return tokens, usage


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple[dict[int, list[int]], int]]:
    """What the streams below are without a fault, as the first test finds."""
    return []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_streams_go_on_when_their_node_is_gone(
    cluster: TestCluster,
    nodes: dict[str, Part],
    undisturbed: list[tuple[dict[int, list[int]], int]],
    how: signal.Signals,
) -> None:
    """It dies, drains (for a second, which is less than they take) or falls silent, while streams
    of all kinds are at different places; their prompts were prefilled elsewhere."""
    prefill = cluster.start_node("prefill-node")
    cluster.wait_nodes(decode=2, prefill=1)
    base: dict[str, Any] = {
        "max_tokens": 300,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    requests = [
        (prompt(10 * number + copy, 90 + copy), base | fields)
        for number, fields in enumerate(STREAMED.values())
        for copy in range(2)
    ]
    with ThreadPoolExecutor(len(requests)) as pool:

        def ask() -> list[Future[list[str]]]:
            return [pool.submit(stream_lines, cluster, tokens, **body) for tokens, body in requests]

        if not undisturbed:
            undisturbed[:] = [whole(each.result()) for each in ask()]
            cluster.wait_idle(prefill, *nodes.values())
        futures = ask()
        until(lambda: max(map(busy, nodes.values())) >= 4, "streams on a node")
        name = max(nodes, key=lambda name: busy(nodes[name]))
        nodes[name].process.send_signal(how)
        outputs = [whole(each.result()) for each in futures]
    assert outputs == undisturbed
    counts = get(f"{cluster.url}/metrics")
    assert metric(counts, "tandem_requests_migrated_total") > 0
    if how is signal.SIGSTOP:
        nodes[name].process.send_signal(signal.SIGCONT)
    else:
        nodes[name].process.wait(20)
        nodes[name] = cluster.start_node("decode-node", f"--node-id={name}", "--drain-timeout=1")
    prefill.kill()
    cluster.wait_nodes(decode=2, prefill=0)
    cluster.wait_idle(*nodes.values())


def busy(node: Part) -> float:
    return node_metric(node, "tandem_sequences_running")


def test_a_unary_request_survives_its_decode_node_and_is_refused_without_another(
    cluster: TestCluster, nodes: dict[str, Part]
) -> None:
    prefill = cluster.start_node("prefill-node")
    cluster.wait_nodes(decode=2, prefill=1)
    tokens = prompt(1, 150)
    sampling = SEEDED | {"max_tokens": 350}
    want = cluster.complete(tokens, **sampling)
    cluster.wait_idle(*nodes.values())

    remaining = dict(nodes)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(cluster.complete, tokens, **sampling)
        remaining.pop(dead := generating(remaining)).kill()
        response = future.result()
    assert response["choices"] == want["choices"]
    assert response["usage"]["completion_tokens"] == want["usage"]["completion_tokens"]
    assert response["tandem"]["decode_nodes"] == [dead, *remaining]

    cluster.wait_nodes(decode=1, prefill=1)
    (node,) = remaining.values()
    (rank,) = psutil.Process(node.process.pid).children()
    connection = open_request(cluster, tokens, **sampling)
    generating(remaining)
    # Its head survives its rank for a moment, and says so itself.
    rank.kill()
    refusal = connection.getresponse()
    assert refusal.status == 503
    assert int(refusal.headers["retry-after"]) >= 1
    assert json.loads(refusal.read())["error"]["code"] == "unavailable"
    connection.close()
    cluster.wait_idle(prefill)
