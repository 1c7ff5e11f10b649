"""Ending one choice of a request, by the service over an engine without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tandem.decode_node.service import DecodeService
from tandem.decode_node.transfers import PrefillSource
from tandem.proto import tandem_pb2 as pb
from tandem.shared.engine.sequence import Sequence
from tandem.tests.decode_node.fake_parts import fake_service
from tandem.tests.support.fake_call import fake_context
from tandem.tests.support.fake_node import FakeNode
from tandem.tests.support.one_call import call_events
from tandem.tests.support.waiting import until

CONTEXT = fake_context()
REQUEST = pb.GenerateRequest(
    request_id="r",
    internal_id=77,
    prompt=range(20),
    sampling=pb.Sampling(max_tokens=300, n=2, ignore_eos=True),
)


@asynccontextmanager
async def running_request(
    node: FakeNode,
) -> AsyncIterator[tuple[DecodeService, asyncio.Queue[Any]]]:
    """A service with a request for two choices; its events, and ``None`` after the last."""

    async def here(sequence: Sequence) -> PrefillSource:
        node.core.submit(sequence, node.core._listeners[sequence])
        return PrefillSource()

    service = fake_service(node, here)
    events: asyncio.Queue[Any] = asyncio.Queue()

    async def hear() -> None:
        async for event in call_events(service, REQUEST):
            events.put_nowait(event)
        events.put_nowait(None)

    async with node.running():
        hearing = asyncio.create_task(hear())
        try:
            yield service, events
            async with asyncio.timeout(20):
                await hearing
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)


async def end(service: DecodeService, index: int, internal_id: int = 77) -> None:
    await service.EndChoice(pb.EndChoiceRequest(internal_id=internal_id, index=index), CONTEXT)


async def one_left(node: FakeNode) -> None:
    """Wait until one choice is left. Looks between any two steps, since all 300 of the other choice
    take milliseconds."""
    async with asyncio.timeout(20):
        while node.scheduler.running != 1 or len(block_tables(node)) != 1:  # noqa: ASYNC110
            await asyncio.sleep(0)


def block_tables(node: FakeNode) -> list[Any]:
    """The running sequences' tables if no other blocks are held; a step in flight holds those of
    sequences that have ended."""
    tables = [sequence.block_table for sequence in node.scheduler._queues.running]
    return tables if node.held() == sum(map(len, tables)) else []


async def tokens_of(events: asyncio.Queue[Any], *indices: int) -> None:
    """Wait until each of these choices has output."""
    missing = set(indices)
    async with asyncio.timeout(20):
        while missing:
            event = await events.get()
            missing -= {event.tokens.index} if event.HasField("tokens") else set()


async def rest(events: asyncio.Queue[Any]) -> list[Any]:
    """The events from now on."""
    following = []
    async with asyncio.timeout(20):
        while (event := await events.get()) is not None:
            following.append(event)
    return following


@pytest.mark.parametrize("first", [0, 1])
async def test_a_choice_that_is_ended_frees_what_it_holds_while_the_other_goes_on(
    first: int,
) -> None:
    node = FakeNode("d", 7)
    node.ranks.says = 5
    async with running_request(node) as (service, events):
        await tokens_of(events, 0, 1)
        await end(service, first)
        await one_left(node)
        (other,) = node.scheduler._queues.running
        assert (other.index, node.held()) == (1 - first, len(other.block_table))
        remaining = await rest(events)
    ends = [event.finished for event in remaining if event.HasField("finished")]
    assert [(e.index, e.reason) for e in ends] == [(1 - first, pb.FINISH_REASON_LENGTH)]
    assert service.requests == 0


async def test_a_request_whose_choices_are_all_ended_is_over() -> None:
    node = FakeNode("d", 7)
    node.ranks.says = 5
    async with running_request(node) as (service, events):
        await tokens_of(events, 0, 1)
        for index in (0, 0, 1):
            await end(service, index)
        assert not [event for event in await rest(events) if event.HasField("finished")]


async def test_nothing_ends_before_the_prompt_is_computed_nor_what_is_not_there() -> None:
    node = FakeNode("d", 7)
    node.ranks.says = 5
    node.ranks.computes.clear()
    async with running_request(node) as (service, events):
        await until(lambda: node.scheduler.running == 1)
        await end(service, 0)
        node.ranks.computes.set()
        await tokens_of(events, 0, 1)
        await end(service, 9)
        await end(service, 0, internal_id=78)
        remaining = await rest(events)
    assert sorted(e.finished.index for e in remaining if e.HasField("finished")) == [0, 1]
