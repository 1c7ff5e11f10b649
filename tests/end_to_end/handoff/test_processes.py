"""Nodes, routers and clients that die, stall, come back or go away, at any point of a transfer."""

from __future__ import annotations

import http.client
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.tests.end_to_end.handoff.campaign import (
    DECODE,
    DETECTION_SECONDS,
    PREFILL,
    Campaign,
    StreamResult,
    reference,
)
from tandem.tests.end_to_end.handoff.fault_proxy import BOTH, DOWN, Mark
from tandem.tests.end_to_end.support.clients import open_request
from tandem.tests.end_to_end.support.cluster import TestCluster, node_metric, until
from tandem.tests.support.extent import cases

# A stream of so many tokens has begun, and not ended, when so many bytes of it have passed.
LONG, BEGUN_BYTES = 30, 500
FRAMES = 'tandem_data_plane_frames_total{direction="sent",rank="0"}'
STALE = 'tandem_data_plane_frames_dropped_total{rank="0",reason="stale"}'


def check(result: StreamResult, mark: Mark, want: list[int]) -> None:
    assert mark.fired.is_set()
    assert (result.tokens, result.error) == (want, "")
    assert result.ended_at - mark.fired_at < DETECTION_SECONDS


@pytest.mark.parametrize(("name", "fraction"), cases([PREFILL, DECODE]))
def test_a_request_outlives_a_killed_node(
    name: str, fraction: float, campaign: Campaign, aggregated: TestCluster
) -> None:
    """The node comes back on its address while the request goes on elsewhere."""
    tokens = campaign.new_prompt()
    want = reference(aggregated, tokens)
    mark = campaign.strike(fraction, lambda: campaign.kill(name))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(campaign.ask, tokens)
        assert mark.fired.wait(DETECTION_SECONDS)
        campaign.restart(name)
        check(future.result(), mark, want)
    campaign.recover()


@pytest.mark.parametrize(("name", "fraction"), cases([DECODE, PREFILL]))
def test_a_request_outlives_a_stopped_node(
    name: str, fraction: float, campaign: Campaign, aggregated: TestCluster
) -> None:
    tokens = campaign.new_prompt()
    want = reference(aggregated, tokens)
    mark = campaign.strike(fraction, lambda: campaign.signal(name, signal.SIGSTOP))
    try:
        check(campaign.ask(tokens), mark, want)
    finally:
        campaign.signal(name, signal.SIGCONT)
    campaign.recover()


@pytest.mark.parametrize(("ways", "fraction"), cases(["both", "down", "up"]))
def test_a_request_outlives_a_cut_between_router_and_node(
    ways: str, fraction: float, campaign: Campaign, aggregated: TestCluster
) -> None:
    tokens = campaign.new_prompt()
    want = reference(aggregated, tokens)
    cut = BOTH if ways == "both" else (ways,)
    mark = campaign.strike(fraction, lambda: campaign.wires[DECODE].grpc.hole(*cut))
    check(campaign.ask(tokens), mark, want)
    # The node has noticed as well, and has ended the abandoned request.
    campaign.cluster.wait_idle(campaign.parts[DECODE])
    campaign.heal()
    campaign.recover()


@pytest.mark.parametrize("fault", ["cut", "killed"])
def test_a_started_stream_continues_on_the_other_node(
    fault: str, campaign: Campaign, aggregated: TestCluster
) -> None:
    tokens = campaign.new_prompt()
    want = reference(aggregated, tokens, LONG)
    wire = campaign.wires[DECODE].grpc
    actions = {"cut": lambda: wire.hole(*BOTH), "killed": lambda: campaign.kill(DECODE)}
    mark = wire.when(DOWN, BEGUN_BYTES, actions[fault])
    check(campaign.ask(tokens, LONG), mark, want)
    campaign.heal()
    if fault == "killed":
        campaign.restart(DECODE)
    campaign.recover()


@pytest.mark.parametrize(("what", "fraction"), cases(["a client that goes away"]))
def test_late_frames_of_an_abandoned_request_are_dropped(
    what: str, fraction: float, campaign: Campaign
) -> None:
    """They arrive on the connection that is still in use: only the attempt distinguishes them."""
    decode, wire = campaign.parts[DECODE], campaign.wires[PREFILL].bulk
    prefill, before = campaign.parts[PREFILL], node_metric(decode, STALE)
    num_frames = node_metric(prefill, FRAMES)
    mark = campaign.strike(fraction, lambda: wire.hole(DOWN))
    client = open_request(campaign.cluster, campaign.new_prompt(), max_tokens=1)
    assert mark.fired.wait(DETECTION_SECONDS)
    # What passed first may have been a ping of ZeroMQ's.
    until(lambda: node_metric(prefill, FRAMES) > num_frames, "a frame to be on its way")
    client.close()
    until(lambda: node_metric(decode, "tandem_transfers_live") == 0, "the transfer to be over")
    wire.heal()
    until(lambda: node_metric(decode, STALE) > before, "the late frames to be dropped")
    campaign.recover()


@pytest.mark.parametrize(("what", "fraction"), cases(["a restarted router"]))
def test_a_router_that_dies_takes_its_requests_with_it_and_nothing_else(
    what: str, fraction: float, campaign: Campaign
) -> None:
    router = campaign.cluster.router
    assert router is not None
    mark = campaign.strike(fraction, router.process.kill)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        campaign.ask(campaign.new_prompt())
    assert mark.fired.is_set()
    campaign.cluster.wait_idle(*campaign.parts.values())
    campaign.restart_router()
    campaign.cluster.wait_nodes(decode=2, prefill=2)
    campaign.recover()
