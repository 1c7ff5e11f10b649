"""One call of a decode node's service, on a stream of its own and without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from itertools import repeat
from typing import Any, cast

import grpc

from tandem.decode_node.service import DecodeService
from tandem.decode_node.streams.router_stream import RequestEndedError
from tandem.proto import tandem_pb2 as pb
from tandem.tests.support.fake_call import FakeContext


async def call_events(
    service: DecodeService, request: pb.GenerateRequest
) -> AsyncGenerator[pb.GenerateEvent, None]:
    """The events of a request, each token as one. Raises ``RequestEndedError`` if it ends with an
    error; closing the generator cancels the request."""
    messages: asyncio.Queue[pb.StreamEvents | None] = asyncio.Queue()

    async def requests() -> AsyncIterator[pb.StreamRequest]:
        yield pb.StreamRequest(number=1, generate=request)

    context = FakeContext()
    context.write = messages.put  # type: ignore[attr-defined]
    stream = asyncio.create_task(service.Stream(requests(), cast(Any, context)))
    stream.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            for choice, token in zip(message.choices or repeat(0), message.tokens, strict=False):
                yield pb.GenerateEvent(tokens=pb.Tokens(index=choice, tokens=[token]))
            for event in message.events:
                if not event.HasField("ended"):
                    yield event.generated
                elif event.ended.status:
                    status = next(c for c in grpc.StatusCode if c.value[0] == event.ended.status)
                    raise RequestEndedError(status, event.ended.details)
        await stream
    finally:
        stream.cancel()
        await asyncio.wait([stream])
