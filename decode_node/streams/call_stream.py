"""The calls of one router on one ``Decode.Stream``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from ...proto import tandem_pb2 as pb
from ...shared.errors import TandemError
from ...shared.node.calls import Caller
from ...shared.process.uninterrupted import uninterrupted
from .outbox import Outbox

log = logging.getLogger("tandem.decode")


# For the status of a stream that is cut off, which may have to wait for the router as well.
CUT_SECONDS = 5.0


class CallEndedError(TandemError):
    """A call ends with an error instead of its last event."""

    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status = status
        self.details = details


class CallOutput:
    """The way of one call's events into the outbox."""

    def __init__(self, outbox: Outbox, call: int) -> None:
        self._outbox = outbox
        self._call = call

    def tokens(self, choice: int, tokens: Sequence[int]) -> None:
        """New tokens without logprobs."""
        self._outbox.put_tokens(self._call, choice, tokens)

    def event(self, event: pb.GenerateEvent) -> None:
        self._outbox.put(self._call, event)

    async def taken(self) -> None:
        """Wait until the router has taken all, between the parts of something large."""
        await self._outbox.emptied()


# Serves one request; raises ``CallEndedError``. Cancelled when the router cancels the call.
Serve = Callable[[pb.GenerateRequest, Caller, CallOutput], Awaitable[None]]


class CallStream:
    """Each call is a task, which ends with the call."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._ending = False
        self._was_cut = False
        self._reading: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[object] | None = None
        self.outbox = Outbox(self._cut)

    @property
    def idle(self) -> bool:
        """True if it has no call, and the router has everything."""
        return not self._calls and not self.outbox.waiting

    async def run(
        self,
        requests: AsyncIterator[pb.StreamRequest],
        context: grpc.aio.ServicerContext[Any, pb.StreamEvents],
    ) -> None:
        """Serve ``requests`` until there are no more, and all calls have ended: the whole work of
        the RPC's handler."""
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
        """End with the last call; none may begin."""
        self._ending = True
        if not self._calls:
            self.outbox.close()

    async def _close(self) -> None:
        """End the calls that still run."""
        tasks = [*self._calls.values(), *filter(None, [self._reading])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pb.StreamRequest]) -> None:
        async for request in requests:
            if request.HasField("generate"):
                self._begin(request)
            elif request.cancel:
                self._cancel(request.call)
        self.end()

    def _begin(self, request: pb.StreamRequest) -> None:
        if request.call in self._calls:
            log.warning("a router used the number %d of a call twice", request.call)
            return
        task = self._calls[request.call] = asyncio.create_task(self._run(request))
        # Not the task itself, which does not run at all if it is cancelled at once.
        task.add_done_callback(lambda _: self._forget(request.call))

    def _forget(self, call: int) -> None:
        del self._calls[call]
        if self._ending:
            self.end()

    def _cancel(self, call: int) -> None:
        task = self._calls.get(call)
        if task is not None:
            task.cancel()
        self.outbox.drop(call)

    async def _run(self, request: pb.StreamRequest) -> None:
        call = request.call
        caller = Caller(request.request_id, request.traceparent)
        try:
            await self._serve(request.generate, caller, CallOutput(self.outbox, call))
            self.outbox.end(call)
        except CallEndedError as error:
            self.outbox.end(call, error.status.value[0], error.details)
        except asyncio.CancelledError:
            self.outbox.drop(call)
            raise
        except Exception as error:
            log.exception("a call failed")
            self.outbox.end(call, grpc.StatusCode.UNKNOWN.value[0], repr(error))

    def _cut(self) -> None:
        """End the stream, and all calls: the router does not read."""
        log.warning("a router has stopped reading: its %d calls end", len(self._calls))
        self._was_cut = True
        if self._writing is not None:
            self._writing.cancel()
