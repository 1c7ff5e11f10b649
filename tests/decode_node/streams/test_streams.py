"""Many requests on one ``Decode.Stream``, by the service over an engine without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from tandem.decode_node.service import DecodeService
from tandem.decode_node.streams import outbox as module
from tandem.decode_node.streams.outbox import Outbox
from tandem.decode_node.transfers import PrefillSource
from tandem.proto import tandem_pb2 as pb
from tandem.shared.engine.sequence import Sequence
from tandem.shared.security.credentials import Credentials
from tandem.tests.decode_node.fake_parts import fake_service
from tandem.tests.support.fake_call import FakeContext
from tandem.tests.support.fake_node import FakeNode
from tandem.tests.support.waiting import until


def speaking() -> FakeNode:
    node = FakeNode("d", 7)
    node.ranks.says = 5
    return node


class StreamingRouter:
    """The router's end of a stream: its requests, and the events of each number."""

    def __init__(self, service: DecodeService) -> None:
        self._service = service
        self._requests: asyncio.Queue[pb.StreamRequest | None] = asyncio.Queue()
        self.tokens: dict[tuple[int, int], int] = {}  # counts by number and choice
        self.events: dict[int, list[str | None]] = {}
        self.ends: dict[int, pb.RequestEnd] = {}

    def generate(self, number: int, **sampling: Any) -> None:
        request = pb.GenerateRequest(
            request_id="r", internal_id=number, prompt=range(20), sampling=pb.Sampling(**sampling)
        )
        self._requests.put_nowait(pb.StreamRequest(number=number, generate=request))

    def cancel(self, number: int) -> None:
        self._requests.put_nowait(pb.StreamRequest(number=number, cancel=True))

    def leave(self) -> None:
        self._requests.put_nowait(None)

    async def run(self) -> None:
        """Open the stream, which ends with this."""
        context = FakeContext()
        context.write = self._read  # type: ignore[attr-defined]
        await self._service.Stream(self._outgoing(), cast(Any, context))

    async def _read(self, message: pb.StreamEvents) -> None:
        choices = message.choices or [0] * len(message.numbers)
        for number, choice in zip(message.numbers, choices, strict=True):
            self._count(number, choice, 1)
        for event in message.events:
            if event.HasField("ended"):
                self.ends[event.number] = event.ended
            elif event.generated.HasField("tokens"):
                tokens = event.generated.tokens
                self._count(event.number, tokens.index, len(tokens.tokens))
            else:
                kind = event.generated.WhichOneof("event")
                self.events.setdefault(event.number, []).append(kind)

    def _count(self, number: int, choice: int, tokens: int) -> None:
        self.tokens[number, choice] = self.tokens.get((number, choice), 0) + tokens

    async def _outgoing(self) -> AsyncIterator[pb.StreamRequest]:
        while (request := await self._requests.get()) is not None:
            yield request


@asynccontextmanager
async def connected(node: FakeNode) -> AsyncIterator[tuple[DecodeService, StreamingRouter]]:
    """A service and a router on a stream, which has ended after the block."""

    async def here(sequence: Sequence) -> PrefillSource:
        node.core.submit(sequence, node.core._listeners[sequence])
        return PrefillSource()

    service = fake_service(node, here)
    router = StreamingRouter(service)
    async with node.running():
        reading = asyncio.create_task(router.run())
        try:
            yield service, router
            async with asyncio.timeout(20):
                await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    assert service.requests == 0


async def test_calls_end_one_by_one_and_then_the_stream() -> None:
    node = speaking()
    async with connected(node) as (_, router):
        router.generate(1, max_tokens=5, ignore_eos=1)
        router.generate(2, max_tokens=30, n=2, ignore_eos=1)
        router.generate(3, max_tokens=100_000)
        router.leave()
    assert router.tokens == {(1, 0): 5, (2, 0): 30, (2, 1): 30}
    assert router.events[1] == ["admitted", "usage", "finished"]
    assert router.ends[1].status == router.ends[2].status == 0
    assert router.ends[3].status == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "context length" in router.ends[3].details


async def test_a_call_that_is_cancelled_frees_what_it_holds_while_others_go_on() -> None:
    node = speaking()
    async with connected(node) as (service, router):
        node.ranks.computes.clear()
        for number in (1, 2):
            router.generate(number, max_tokens=400, ignore_eos=1)
        await until(lambda: service.requests == 2)
        router.cancel(1)
        await until(lambda: service.requests == 1)
        node.ranks.computes.set()
        router.generate(3, max_tokens=400, ignore_eos=1)
        router.cancel(3)  # before it has begun
        router.leave()
    assert router.tokens == {(2, 0): 400} and list(router.ends) == [2]


async def test_a_drain_ends_the_stream_with_its_last_call_or_with_the_time_limit() -> None:
    node = speaking()
    async with connected(node) as (service, router):
        node.ranks.computes.clear()
        router.generate(1, max_tokens=400, ignore_eos=1)
        await until(lambda: service.requests == 1)
        service.drain()
        router.generate(2, max_tokens=1)
        await until(lambda: 2 in router.ends)
        assert service.busy and "draining" in router.ends[2].details
        service.cut_off()
        node.ranks.computes.set()
    assert router.ends[1].status == grpc.StatusCode.UNAVAILABLE.value[0]
    assert "draining" in router.ends[1].details


async def test_each_call_needs_a_token_that_is_still_valid() -> None:
    node = speaking()
    async with connected(node) as (service, router):
        service._credentials = Credentials(token="new")
        router.generate(1, max_tokens=1)
        router.leave()
    assert router.ends[1].status == grpc.StatusCode.UNAUTHENTICATED.value[0]


async def test_an_outbox_sends_columns_before_events_and_forgets_cancelled_calls() -> None:
    box = Outbox(lambda: None)
    box.put_tokens(1, 0, [10])
    box.put_tokens(2, 1, [20, 21])
    box.put(1, pb.GenerateEvent(finished=pb.Finished()))
    box.put_tokens(1, 0, [11])
    box.put_tokens(3, 0, [30])
    box.end(2)
    box.drop(3)
    box.close()
    (message,) = [message async for message in box.messages()]
    assert list(message.numbers) == [1, 2, 2] and list(message.choices) == [0, 1, 1]
    assert list(message.tokens) == [10, 20, 21]
    assert [event.number for event in message.events] == [1, 1, 2]
    assert list(message.events[1].generated.tokens.tokens) == [11]


async def test_a_router_that_stops_reading_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 100)
    cut: list[bool] = []
    box = Outbox(lambda: cut.append(True))
    for token in range(1000):
        box.put_tokens(1, 0, [token])
        box.end(2)
    assert cut == [True] and box.waiting < 100 + 2 * module.EVENT_WEIGHT
