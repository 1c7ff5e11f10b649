"""Arbitrary requests of decode nodes: an attempt begins or is refused, and leaves nothing held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from hypothesis import example, given

from tandem.prefill_node.service import PrefillService
from tandem.proto import tandem_pb2 as pb
from tandem.shared.config import HandoffConfig
from tandem.shared.errors import RequestError
from tandem.shared.node.introduction import introduction
from tandem.tests.support.fake_call import AbortedError, fake_context
from tandem.tests.support.fake_node import RANKS, FakeNode
from tandem.tests.support.fuzz import FEWER, changed

OPEN = pb.OpenRequest(
    transfer_id=1,
    attempt=1,
    node_id="d",
    epoch=7,
    peer_epoch=3,
    prompt=range(100),
    first_token=20,
    end_token=99,
    window_bytes=1 << 20,
    ranks=RANKS,
    kv_dtype="float32",
    deadline_seconds=5.0,
)
CONTEXT = fake_context(
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[PrefillService, FakeNode]]:
    node = FakeNode("p", 3)
    service = PrefillService(
        node.engine,
        node.identity,
        node.ranks.inbox,
        node.metrics,
        pb.StatusReply,
        HandoffConfig(transfer_timeout=5.0),
    )
    async with node.running():
        yield service, node


def _within(seconds: float) -> pb.OpenRequest:
    request = pb.OpenRequest()
    request.CopyFrom(OPEN)
    request.deadline_seconds = seconds
    return request


@FEWER
@given(changed(OPEN))
@example(_within(float("nan")))
def test_an_attempt_of_any_kind_begins_or_is_refused(request: pb.OpenRequest) -> None:
    asyncio.run(_open(request))


async def _open(request: pb.OpenRequest) -> None:
    async with serving() as (service, _):
        events: Any = service.Open(request, CONTEXT)
        try:
            async with asyncio.timeout(30):
                first = await anext(events)
                assert first.HasField("accepted") and service.live == 1
                assert service._sending[request.transfer_id]._transfer.remaining <= 5  # NaN is not
        except AbortedError:
            pass
        finally:
            await events.aclose()
        assert service.live == 0


@FEWER
@given(changed(introduction(FakeNode("d", 7).engine, FakeNode("d", 7).identity), max_changes=4))
def test_any_greeting_gets_a_reply_or_a_rejection(request: pb.Introduction) -> None:
    async def greet() -> None:
        async with serving() as (service, node):
            try:
                reply = await service.Hello(request, CONTEXT)
            except AbortedError:
                return
            assert reply.node.epoch == node.identity.epoch

    asyncio.run(greet())


@FEWER
@given(changed(pb.TransferIds(node_id="d", epoch=7, ids=[1])))
def test_invalid_ids_match_no_node(request: pb.TransferIds) -> None:
    async def ask() -> None:
        async with serving() as (service, _):
            for method in (service.Renew, service.Release):
                assert not (await method(request, CONTEXT)).ids
            live_request = pb.LiveRequest(node_id=request.node_id, epoch=request.epoch)
            assert not (await service.Live(live_request, CONTEXT)).ids

    asyncio.run(ask())


def test_an_open_without_fields_is_refused() -> None:
    asyncio.run(_open(pb.OpenRequest()))


def test_a_deadline_before_now_is_no_time() -> None:
    assert _refusal(_within(-1.0)) == "deadline_seconds is -1.0; it must not be negative"
    assert _refusal(_within(float("nan"))) == "deadline_seconds is nan; it must not be negative"


def _refusal(request: pb.OpenRequest) -> str:
    async def ask() -> str:
        async with serving() as (service, _):
            with pytest.raises(RequestError) as error:
                service._check(request)
            return str(error.value)

    return asyncio.run(ask())
