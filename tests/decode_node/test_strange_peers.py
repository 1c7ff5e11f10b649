"""Arbitrary messages from prefill nodes and routers: accepted, or refused by name."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.decode_node.estimate import LocalEstimate, RemoteEstimate, why_local
from tandem.decode_node.peering.link import MeasuredLink
from tandem.decode_node.peering.peer import Peer
from tandem.decode_node.peering.peers import Peers, _renew_seconds
from tandem.decode_node.streams.router_stream import RequestEndedError
from tandem.decode_node.transfers import PrefillSource
from tandem.proto import tandem_pb2 as pb
from tandem.shared.engine.sequence import Sequence
from tandem.shared.errors import TransferError, UnavailableError
from tandem.tests.decode_node.fake_parts import fake_service
from tandem.tests.decode_node.fake_prefill import prefill
from tandem.tests.support.fake_node import RANKS, FakeNode
from tandem.tests.support.fuzz import FEWER, changed, protos
from tandem.tests.support.one_call import call_events

NAN, INF = float("nan"), float("inf")
HELLO = pb.HelloReply(
    node=pb.Introduction(node_id="p", epoch=3, kv_dtype="float32"),
    ranks=[pb.RankEndpoint(rank=i, bulk="tcp://*:1", control="tcp://*:2") for i in range(RANKS)],
    lease_seconds=10.0,
)


def _hello(**changes: Any) -> pb.HelloReply:
    reply = pb.HelloReply()
    reply.CopyFrom(HELLO)
    for name, value in changes.items():
        setattr(reply, name, value)
    return reply


def _at(endpoint: str) -> pb.HelloReply:
    reply = _hello()
    reply.ranks[0].bulk = endpoint
    return reply


async def _sound(peer: Peer) -> None:
    """A canary that always passes."""


class Greeted:
    """Answers one RPC with a given reply."""

    def __init__(self, reply: pb.HelloReply) -> None:
        self._reply = reply

    async def Hello(self, request: pb.Introduction, timeout: float) -> pb.HelloReply:
        return self._reply


@FEWER
@given(changed(HELLO, max_changes=2) | st.builds(_at, st.text(max_size=20)))
@example(_at("tcp://["))
@example(_at("tcp://*:x"))
@example(_at("tcp://*:99999"))
@example(_hello(lease_seconds=NAN))
@example(_hello(lease_seconds=INF))
@example(_hello(lease_seconds=-1.0))
def test_a_greeting_of_any_kind_makes_a_peer_or_an_error(reply: pb.HelloReply) -> None:
    node = FakeNode("d", 7)
    peers = Peers(node.engine, node.identity, _sound, node.metrics)
    try:
        peer = peers._greeter.peer_from("127.0.0.1:9", reply, Greeted(reply), None)  # type: ignore[arg-type]
    except TransferError as error:
        assert str(error)
        return
    assert len(peer.parts) >= RANKS
    assert 0 < _renew_seconds(peer) < INF
    assert all(part.sender < len(peer.endpoints) for part in peer.parts)


async def test_a_request_continues_after_a_nonsensical_greeting() -> None:
    node = FakeNode("d", 7)
    peers = Peers(node.engine, node.identity, _sound, node.metrics)
    async with prefill() as fake:
        fake.lease_seconds = NAN
        with pytest.raises(TransferError, match="lease_seconds is nan"):
            await peers.meet(fake.candidate)
    await peers.close()


@given(protos(pb.OpenDone))
@example(pb.OpenDone(bytes=1 << 30, compute_seconds=NAN))
def test_an_account_of_any_kind_leaves_a_rate(done: pb.OpenDone) -> None:
    link = MeasuredLink()
    link.add_transfer(100, done)
    link.add_transfer(100, pb.OpenDone(bytes=1 << 30, compute_seconds=0.1, exposed_seconds=0.1))
    assert math.isfinite(link.tokens_per_second)
    there = RemoteEstimate(link_tokens_per_second=link.tokens_per_second)
    assert isinstance(
        why_local(LocalEstimate(tokens_per_second=9.0), there, prompt=9, missing=9), str
    )


# ---- what a router may ask -----------------------------------------------------------------------


MAY_ABORT = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


async def _nowhere(sequence: Sequence) -> PrefillSource:
    """A prefill that never happens: the test has no model."""
    raise UnavailableError("admitted")


GENERATE = pb.GenerateRequest(
    request_id="r",
    prompt=range(20),
    sampling=pb.Sampling(temperature=1.0, max_tokens=5, n=1, top_p=1.0),
    deadline_seconds=9.0,
)


def _generate(**changes: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    request.CopyFrom(GENERATE)
    for name, value in changes.items():
        setattr(request, name, value)
    return request


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    request = draw(changed(GENERATE, max_changes=1))
    request.sampling.CopyFrom(draw(changed(GENERATE.sampling)))
    return request


@FEWER
@given(requests())
@example(_generate(deadline_seconds=NAN))
@example(_generate(deadline_seconds=-1.0))
@example(_generate(deadline_seconds=INF))
def test_a_request_of_any_kind_is_admitted_or_refused(request: pb.GenerateRequest) -> None:
    asyncio.run(_ask(request))


async def _ask(request: pb.GenerateRequest) -> None:
    node = FakeNode("d", 7)
    service = fake_service(node, _nowhere)
    async with node.running():
        events = call_events(service, request)
        with pytest.raises(RequestEndedError) as caught:
            async with asyncio.timeout(30):
                assert (await anext(events)).HasField("admitted")
                assert request.deadline_seconds >= 0
                await anext(events)
        await events.aclose()
    assert caught.value.status in MAY_ABORT
    assert service.requests == 0
