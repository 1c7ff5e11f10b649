"""One ``Decode.Stream``: any number of requests to a node, with a message for each step."""

from __future__ import annotations

import asyncio
from contextvars import Context
from itertools import repeat

import grpc

from ...proto import tandem_pb2 as pb
from ...shared.telemetry.logs import REQUEST_ID_HEADER
from ...shared.telemetry.tracing import TRACEPARENT, Metadata
from .events import RequestFailedError
from .remote_request import RemoteRequest

# How long a stream stays open without requests; gRPC pings its node every second.
IDLE_SECONDS = 30.0


class NodeStream:
    """Reads and writes one RPC. ``over`` is final: requests then need a new stream."""

    def __init__(self, rpc: grpc.aio.StreamStreamCall[pb.StreamRequest, pb.StreamEvents]) -> None:
        self._rpc = rpc
        self._running: dict[int, RemoteRequest] = {}
        self._numbers: dict[RemoteRequest, int] = {}
        self._last = 0
        # Unsent messages by request: its start, or else its cancellation.
        self._unsent: dict[int, pb.StreamRequest] = {}
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._idle: asyncio.TimerHandle | None = None
        self._retired = False
        self.over = False

    def start(self) -> None:
        """Start reading and writing, outside the context of any request."""
        for work in (self._read(), self._write()):
            self._tasks.append(asyncio.create_task(work, context=Context()))

    def begin(
        self, request: pb.GenerateRequest, metadata: Metadata, *, reuses: bool
    ) -> RemoteRequest:
        """Start a request."""
        self._last += 1
        remote = RemoteRequest(request, self._cancel, reuses=reuses)
        self._running[self._last] = remote
        self._numbers[remote] = self._last
        headers = dict(metadata)
        self._send(
            pb.StreamRequest(
                number=self._last,
                generate=request,
                request_id=headers.get(REQUEST_ID_HEADER, ""),
                traceparent=headers.get(TRACEPARENT, ""),
            )
        )
        if self._idle is not None:
            self._idle.cancel()
        return remote

    def retire(self) -> None:
        """End after the last request."""
        self._retired = True
        self._note_idle()

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """End now, and end all requests with this error."""
        if self.over:
            return
        self.over = True
        self._rpc.cancel()
        for task in self._tasks:
            task.cancel()
        running, self._running = self._running, {}
        self._numbers.clear()
        self._unsent.clear()
        for remote in running.values():
            remote.end(RequestFailedError(code, details))

    async def close(self) -> None:
        """Fail all requests, and wait until the tasks have ended."""
        self.fail(grpc.StatusCode.CANCELLED, "the stream was closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- to the node -------------------------------------------------------------------------

    def _cancel(self, remote: RemoteRequest) -> None:
        number = self._forget(remote)
        if number is None:
            return
        remote.end(RequestFailedError(grpc.StatusCode.CANCELLED, "the router cancelled it"))
        if self._unsent.pop(number, None) is None:
            self._send(pb.StreamRequest(number=number, cancel=True))

    def _send(self, request: pb.StreamRequest) -> None:
        self._unsent[request.number] = request
        self._work.set()

    async def _write(self) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self._unsent:
                    await self._rpc.write(self._unsent.pop(next(iter(self._unsent))))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader gets the reason

    # -- from the node -----------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            async for message in self._rpc:
                self._hand_out(message)
        except grpc.aio.AioRpcError as error:
            self.fail(error.code(), error.details() or "")
        finally:
            self.fail(grpc.StatusCode.UNAVAILABLE, "the node ended the stream")

    def _hand_out(self, message: pb.StreamEvents) -> None:
        running = self._running
        for number, choice, token in zip(
            message.numbers, message.choices or repeat(0), message.tokens, strict=False
        ):
            if (remote := running.get(number)) is not None:
                remote.add_token(choice, token)
        for event in message.events:
            if (remote := running.get(event.number)) is None:
                continue  # cancelled meanwhile
            if event.HasField("ended"):
                self._end(remote, event.ended)
            else:
                remote.add(event.generated)

    def _end(self, remote: RemoteRequest, ended: pb.RequestEnd) -> None:
        self._forget(remote)
        if ended.status == 0:
            remote.end()
        else:
            remote.end(RequestFailedError(_code(ended.status), ended.details, by_node=True))

    def _forget(self, remote: RemoteRequest) -> int | None:
        number = self._numbers.pop(remote, None)
        if number is not None:
            del self._running[number]
            self._note_idle()
        return number

    def _note_idle(self) -> None:
        if self._running or self.over:
            return
        seconds = 0.0 if self._retired else IDLE_SECONDS
        if self._idle is not None:
            self._idle.cancel()
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(seconds, self.fail, grpc.StatusCode.CANCELLED, "it was idle")


def _code(status: int) -> grpc.StatusCode:
    codes = (code for code in grpc.StatusCode if code.value[0] == status)
    return next(codes, grpc.StatusCode.UNKNOWN)
