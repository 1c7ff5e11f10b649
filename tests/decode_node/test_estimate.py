"""The choice of local or remote prefill, as a table; measurements of the link."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from tandem.decode_node.estimate import LocalEstimate, RemoteEstimate, why_local
from tandem.decode_node.peering.link import DEFAULT_ROUND_TRIP, MIN_BYTES, MeasuredLink
from tandem.proto import tandem_pb2 as pb

REMOTE, FASTER, BELOW, NONE = "", "faster here", "below threshold", "nothing missing"
LATE = "too late there"
# Two equal nodes, 5 ms apart: a transfer's round trips cost as much as 20 tokens.
EQUAL: dict[str, Any] = {"rate": 1000.0, "trip": 0.005}


@pytest.mark.parametrize(
    ("missing", "facts", "where"),
    [
        # Between idle, equal nodes the round trips decide.
        (20, EQUAL, FASTER),
        (21, EQUAL, REMOTE),
        (8000, EQUAL, REMOTE),
        # Far away, on a fast node.
        (100, EQUAL | {"trip": 0.05}, FASTER),
        (300, EQUAL | {"trip": 0.05}, REMOTE),
        # The queue there is as long as the prompt: faster here, ...
        (1000, EQUAL | {"queue": 1000}, FASTER),
        # ... unless this node has a queue too, or streams that would be delayed.
        (1000, EQUAL | {"queue": 1000, "own_queue": 100}, REMOTE),
        (1000, EQUAL | {"queue": 1000, "running": 3}, REMOTE),
        (1000, EQUAL | {"queue": 5000, "running": 3}, FASTER),
        # A slow prefill node only pays off if this node has streams.
        (1000, EQUAL | {"there": 400.0}, FASTER),
        (1000, EQUAL | {"there": 400.0, "running": 4}, REMOTE),
        (1000, EQUAL | {"there": 9000.0, "queue": 9000}, REMOTE),
        # A link that moves tokens more slowly than this node computes them.
        (1000, EQUAL | {"link": 400.0}, FASTER),
        (1000, EQUAL | {"link": 800.0}, REMOTE),
        (1000, EQUAL | {"link": 1e6}, REMOTE),
        # A long prefix that is cached here may have to be computed again there.
        (200, EQUAL | {"prompt": 10_000}, FASTER),
        (5000, EQUAL | {"prompt": 10_000, "running": 2}, REMOTE),
        # Nothing is measured yet.
        (63, {}, BELOW),
        (64, {}, REMOTE),
        (64, {"queue": 10**6, "trip": 9.0}, REMOTE),
        # Only a lower bound of this node's rate, which may show that the link is slower.
        (63, {"bound": 1000.0, "there": 9000.0}, BELOW),
        (1000, {"bound": 1000.0, "there": 9000.0}, REMOTE),
        (1000, {"bound": 1000.0, "there": 9000.0, "link": 600.0}, REMOTE),
        (1000, {"bound": 1000.0, "there": 9000.0, "link": 400.0}, FASTER),
        (1000, {"bound": 1000.0, "link": 400.0}, FASTER),
        (1000, {"bound": 1000.0, "seconds": 1}, REMOTE),
        (1000, EQUAL | {"bound": 9000.0, "link": 800.0}, REMOTE),
        # The operator's threshold overrides all measurements.
        (99, EQUAL | {"threshold": 100}, BELOW),
        (100, EQUAL | {"threshold": 100, "queue": 10**6}, REMOTE),
        (1, {"threshold": 1}, REMOTE),
        # The deadline passes before remote prefill would end.
        (1000, EQUAL | {"running": 3, "seconds": 1.03}, REMOTE),
        (1000, EQUAL | {"running": 3, "seconds": 1.01}, LATE),
        (1000, EQUAL | {"queue": 1000, "running": 3, "seconds": 1.5}, LATE),
        (1000, EQUAL | {"link": 800.0, "running": 3, "seconds": 1.2}, LATE),
        (100, EQUAL | {"threshold": 100, "queue": 10**6, "seconds": 900}, LATE),
        (100, {"there": 50.0, "threshold": 100, "seconds": 1}, LATE),
        (100, {"seconds": 1}, REMOTE),
        # All of it is cached, so there is nothing to transfer, however long the queue here.
        (0, {}, NONE),
        (0, EQUAL | {"prompt": 100, "own_queue": 10**6}, NONE),
        (0, {"threshold": 1}, NONE),
    ],
)
def test_where(missing: int, facts: dict[str, Any], where: str) -> None:
    here = LocalEstimate(
        tokens_per_second=facts.get("rate", 0.0),
        min_tokens_per_second=facts.get("bound", 0.0),
        queued_tokens=facts.get("own_queue", 0),
        running=facts.get("running", 0),
    )
    there = RemoteEstimate(
        tokens_per_second=facts.get("there", 0.0),
        queued_tokens=facts.get("queue", 0),
        round_trip=facts.get("trip", 0.0),
        link_tokens_per_second=facts.get("link", 0.0),
    )
    reason = why_local(
        here,
        there,
        prompt=facts.get("prompt", missing),
        missing=missing,
        threshold=facts.get("threshold"),
        seconds=facts.get("seconds", inf),
    )
    assert reason == where


def account(compute: float, exposed: float, size: int = MIN_BYTES) -> pb.OpenDone:
    return pb.OpenDone(bytes=size, compute_seconds=compute, exposed_seconds=exposed)


def test_the_shortest_call_is_the_round_trip() -> None:
    link = MeasuredLink()
    assert link.round_trip == DEFAULT_ROUND_TRIP
    for seconds, shortest in ((0.02, 0.02), (0.01, 0.01), (0.5, 0.01)):
        link.add_round_trip(seconds)
        assert link.round_trip == shortest


def test_a_transfer_that_computed_longer_than_it_moved_shows_only_a_bound() -> None:
    link = MeasuredLink()
    link.add_transfer(1000, account(1.0, 0.0))
    assert link.tokens_per_second == 1000
    link.add_transfer(1000, account(2.0, 0.1))
    assert link.tokens_per_second == 1000
    link.add_transfer(1000, account(0.5, 0.0))
    assert link.tokens_per_second == 2000


def test_a_link_that_got_slow_is_noticed() -> None:
    link = MeasuredLink()
    link.add_transfer(1000, account(0.5, 0.0))
    for _ in range(20):
        link.add_transfer(1000, account(0.5, 9.5))
    assert link.tokens_per_second == pytest.approx(100, rel=0.05)


def test_a_small_transfer_does_not_measure_the_link() -> None:
    link = MeasuredLink()
    link.add_transfer(10, account(0.0, 0.5, size=1000))
    link.add_transfer(10, account(0.0, 0.0))
    assert link.tokens_per_second == 0
