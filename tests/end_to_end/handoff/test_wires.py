"""Faults of the connections between two nodes at any point of a transfer. Clients notice only a
delay of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.tests.end_to_end.handoff.campaign import (
    DETECTION_SECONDS,
    PREFILL,
    Campaign,
    Wires,
    reference,
)
from tandem.tests.end_to_end.handoff.fault_proxy import BOTH, DOWN, UP, Wire
from tandem.tests.end_to_end.support.cluster import TestCluster
from tandem.tests.support.extent import cases, selected


def _each(wires: Iterable[Wire], fault: Callable[..., None], *of: str, **by: float) -> None:
    for wire in wires:
        fault(wire, *of, **by)


MEGABYTE = 1_000_000


FAULTS: dict[str, Callable[[Wires], object]] = {
    "black hole of bulk": lambda to: to.bulk.hole(*BOTH),
    "black hole of control": lambda to: to.control.hole(*BOTH),
    "black hole of bulk and control": lambda to: _each((to.bulk, to.control), Wire.hole, *BOTH),
    "black hole of gRPC": lambda to: to.grpc.hole(*BOTH),
    "black hole of everything": lambda to: _each(to.all(), Wire.hole, *BOTH),
    "bulk cut towards the decode node": lambda to: to.bulk.hole(DOWN),
    "bulk cut towards the prefill node": lambda to: to.bulk.hole(UP),
    "control cut towards the decode node": lambda to: to.control.hole(DOWN),
    "control cut towards the prefill node": lambda to: to.control.hole(UP),
    "gRPC cut towards the decode node": lambda to: to.grpc.hole(DOWN),
    "gRPC cut towards the prefill node": lambda to: to.grpc.hole(UP),
    "reset of bulk": lambda to: to.bulk.reset(),
    "reset of control": lambda to: to.control.reset(),
    "reset of gRPC": lambda to: to.grpc.reset(),
    "flipped bit of KV": lambda to: to.bulk.flip(DOWN),
    "flipped bit of an acknowledgement": lambda to: to.control.flip(UP),
    "doubled chunk of KV": lambda to: to.bulk.duplicate(DOWN),
    "doubled acknowledgements": lambda to: to.control.duplicate(UP),
    "throttled to a megabyte a second": lambda to: to.bulk.slow(DOWN, rate=MEGABYTE),
    "delayed by 20 ms a chunk": lambda to: _each(to.all(), Wire.slow, *BOTH, delay=0.02),
}


# Each of them breaks what another one breaks as well.
FULL_ONLY = {
    "black hole of bulk and control",
    "bulk cut towards the prefill node",
    "control cut towards the decode node",
    "gRPC cut towards the decode node",
    "delayed by 20 ms a chunk",
}
CHOSEN = selected([fault for fault in FAULTS if fault not in FULL_ONLY], full=sorted(FULL_ONLY))


@pytest.mark.parametrize(("fault", "fraction"), cases(CHOSEN))
def test_a_request_outlives(
    fault: str, fraction: float, campaign: Campaign, aggregated: TestCluster
) -> None:
    wires = campaign.wires[PREFILL]
    tokens = campaign.new_prompt()
    want = reference(aggregated, tokens)
    mark = campaign.strike(fraction, lambda: FAULTS[fault](wires))
    result = campaign.ask(tokens)
    assert mark.fired.is_set()
    assert (result.tokens, result.error) == (want, "")
    assert result.ended_at - mark.fired_at < DETECTION_SECONDS
    campaign.heal()
    campaign.recover()


def test_an_unreachable_node_costs_many_requests_no_more_than_one(
    campaign: Campaign, aggregated: TestCluster
) -> None:
    """Its heartbeats still reach the router, which goes on naming it."""
    prompts = [campaign.new_prompt() for _ in range(8)]
    want = [reference(aggregated, tokens) for tokens in prompts]
    for wire in campaign.wires[PREFILL].all():
        wire.reset()
        wire.hole(*BOTH)
    start = time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as pool:
        results = list(pool.map(campaign.ask, prompts))
    assert [(result.tokens, result.error) for result in results] == [(one, "") for one in want]
    assert max(result.ended_at for result in results) - start < DETECTION_SECONDS
    campaign.heal()
    campaign.recover()
