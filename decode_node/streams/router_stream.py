"""The requests of one router on one ``Decode.Stream``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from ...proto import tandem_pb2 as pb
from ...shared.errors import TandemError
from ...shared.node.rpc_context import RpcContext
from ...shared.process.tasks import uninterrupted
from .outbox import Outbox

log = logging.getLogger("tandem.decode")

# Time limit for sending the status of a stream that is cut off: it may wait for the router too.
CUT_SECONDS = 5.0


class RequestEndedError(TandemError):
    """A request ends with an error instead of its last event."""

    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status = status
        self.details = details


class RequestOutput:
    """Puts one request's events into the outbox."""

    def __init__(self, outbox: Outbox, number: int) -> None:
        self._outbox = outbox
        self._number = number

    def tokens(self, choice: int, tokens: Sequence[int]) -> None:
        """New tokens without logprobs."""
        self._outbox.put_tokens(self._number, choice, tokens)

    def event(self, event: pb.GenerateEvent) -> None:
        self._outbox.put(self._number, event)

    async def drain(self) -> None:
        """Wait until everything is sent, before the next part of something large."""
        await self._outbox.drain()


# Serves one request; raises ``RequestEndedError``. Cancelled when the router cancels the request.
Serve = Callable[[pb.GenerateRequest, RpcContext, RequestOutput], Awaitable[None]]


class RouterStream:
    """Runs each request of the stream as a task."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ending = False
        self._was_cut = False
        self._reading: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[object] | None = None
        self.outbox = Outbox(self._cut)

    @property
    def idle(self) -> bool:
        """True if no request runs and everything is sent."""
        return not self._tasks and not self.outbox.waiting

    async def run(
        self,
        requests: AsyncIterator[pb.StreamRequest],
        context: grpc.aio.ServicerContext[Any, pb.StreamEvents],
    ) -> None:
        """Serve ``requests`` until there are no more and all have ended: the body of the RPC."""
        self._writing = asyncio.current_task()
        self._reading = asyncio.create_task(self._read(requests))
        try:
            async for message in self.outbox.messages():
                await context.write(message)
        except asyncio.CancelledError:
            if not self._was_cut:
                raise
        finally:
            await uninterrupted(self._close())
        if self._was_cut:
            async with asyncio.timeout(CUT_SECONDS):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the router has stopped reading")

    def end(self) -> None:
        """End the stream with its last request."""
        self._ending = True
        if not self._tasks:
            self.outbox.close()

    async def _close(self) -> None:
        """End the requests that still run."""
        tasks = [*self._tasks.values(), *filter(None, [self._reading])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pb.StreamRequest]) -> None:
        async for request in requests:
            if request.HasField("generate"):
                self._begin(request)
            elif request.cancel:
                self._cancel(request.number)
        self.end()

    def _begin(self, request: pb.StreamRequest) -> None:
        if request.number in self._tasks:
            log.warning("a router used the number %d of a request twice", request.number)
            return
        task = self._tasks[request.number] = asyncio.create_task(self._run(request))
        # Not in the task itself, which never runs if it is cancelled at once.
        task.add_done_callback(lambda _: self._forget(request.number))

    def _forget(self, number: int) -> None:
        del self._tasks[number]
        if self._ending:
            self.end()

    def _cancel(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()
        self.outbox.drop(number)

    async def _run(self, request: pb.StreamRequest) -> None:
        number = request.number
        context = RpcContext(request.request_id, request.traceparent)
        try:
            await self._serve(request.generate, context, RequestOutput(self.outbox, number))
            self.outbox.end(number)
        except RequestEndedError as error:
            self.outbox.end(number, error.status.value[0], error.details)
        except asyncio.CancelledError:
            self.outbox.drop(number)
            raise
        except Exception as error:
            log.exception("a request failed")
            self.outbox.end(number, grpc.StatusCode.UNKNOWN.value[0], repr(error))

    def _cut(self) -> None:
        """End the stream, and all requests: the router does not read."""
        log.warning("a router has stopped reading: its %d requests end", len(self._tasks))
        self._was_cut = True
        if self._writing is not None:
            self._writing.cancel()
