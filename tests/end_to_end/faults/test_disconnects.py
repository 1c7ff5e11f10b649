"""Clients that go away by the hundred, in each phase of a request: nothing of theirs stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.tests.end_to_end.support.clients import greedy, open_request, prompt
from tandem.tests.end_to_end.support.cluster import TestCluster, get, metric, node_metric, until
from tandem.tests.support.extent import selected

CLIENTS = 100
RUNNING, WAITING = "tandem_sequences_running", "tandem_sequences_waiting"


def vanish(cluster: TestCluster, in_phase: Callable[[], bool], length: int, stream: bool) -> None:
    """All ask at once, and close their connections when the phase has been reached."""
    clients = [
        open_request(cluster, prompt(1000 + seed, length), max_tokens=500 - length, stream=stream)
        for seed in range(CLIENTS)
    ]
    try:
        until(in_phase, "the phase in which the clients go away")
    finally:
        for client in clients:
            client.close()


def assert_nothing_is_left(cluster: TestCluster) -> None:
    cluster.wait_idle(*cluster.parts[1:])
    name = 'vllm:num_requests_running{engine="0",model_name="qwen3"}'
    until(lambda: metric(get(f"{cluster.url}/metrics"), name) == 0, "the router to forget them")


@pytest.mark.parametrize(
    ("phase", "kind"),
    selected(
        [
            ("queued", "unary"),
            ("local prefill", "streamed"),
            ("decode", "unary"),
            ("decode", "streamed"),
        ],
        full=[("queued", "streamed"), ("local prefill", "unary")],
    ),
)
def test_clients_that_vanish_from_a_node_alone(
    aggregated: TestCluster, phase: str, kind: str
) -> None:
    want = greedy(aggregated, 8)
    (decode,) = aggregated.parts[1:]
    length, in_phase = {
        "queued": (200, lambda: node_metric(decode, WAITING) > CLIENTS / 2),
        "local prefill": (480, lambda: node_metric(decode, "tandem_prefill_queue_tokens") > 5000),
        "decode": (2, lambda: node_metric(decode, RUNNING) > 10),
    }[phase]
    vanish(aggregated, in_phase, length, kind == "streamed")
    assert_nothing_is_left(aggregated)
    assert greedy(aggregated, 8) == want


@pytest.mark.parametrize(
    ("disaggregated", "kind"),
    selected(
        [("shared_memory", "streamed"), ("tcp", "unary")],
        full=[("shared_memory", "unary"), ("tcp", "streamed")],
    ),
    indirect=["disaggregated"],
)
def test_clients_that_vanish_during_remote_prefill(disaggregated: TestCluster, kind: str) -> None:
    want = greedy(disaggregated, 8)
    prefill, decode = disaggregated.parts[1:]

    def in_phase() -> bool:
        live = "tandem_transfers_live"
        return node_metric(decode, live) > 2 and node_metric(prefill, live) > 2

    vanish(disaggregated, in_phase, 480, kind == "streamed")
    assert_nothing_is_left(disaggregated)
    assert greedy(disaggregated, 8) == want
