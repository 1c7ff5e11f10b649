"""One of the calls on a ``Decode.Stream``, and its events that the request has not read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc

from ...proto import tandem_pb2 as pb
from .node_events import CallFailedError, NodeEvent, PlainTokens

# What is read at once takes a few milliseconds to write.
MOST_EVENTS = 64
MOST_TOKENS = 64  # of one event
# Events of a call besides tokens and prompt logprobs, generously.
OTHER_EVENTS = 64


class MultiplexedCall:
    """See ``GenerateCall``. What a client that reads slowly leaves waiting is bounded by the length
    of its answer; a node that sends more than that fails the call."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        cancel: Callable[[MultiplexedCall], None],
        *,
        reuses: bool,
    ) -> None:
        self.reuses = reuses
        self._cancel = cancel
        self._events: list[NodeEvent] = []
        self._growing: dict[int, PlainTokens] = {}  # the last waiting event of a choice
        self._waiting = 0  # tokens and other events
        sampling = request.sampling
        tokens = max(1, sampling.n) * (sampling.max_tokens + 1)
        self._most = tokens + len(request.prompt) + OTHER_EVENTS
        self._reader: asyncio.Future[None] | None = None
        self._over = False
        self._error: CallFailedError | None = None

    async def read(self) -> Sequence[NodeEvent]:
        if self._events or self._over:
            # The request is behind. Others go first, and meanwhile more arrives to be read at once.
            await asyncio.sleep(0)
        else:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._events:
            return self._taken()
        if self._error is not None:
            raise self._error
        return ()

    def cancel(self) -> None:
        if not self._over:
            self._cancel(self)

    # -- for the stream ----------------------------------------------------------------------

    def add_token(self, choice: int, token: int) -> None:
        """Add a token; those of a choice that wait are read as one event."""
        if self._over:
            return
        last = self._growing.get(choice)
        if last is not None and len(last.tokens) < MOST_TOKENS:
            last.tokens.append(token)
        else:
            last = self._growing[choice] = PlainTokens(choice, [token])
            self._events.append(last)
        self._note(1)

    def add(self, event: pb.GenerateEvent) -> None:
        self._growing.clear()
        self._events.append(event)
        self._note(max(1, len(event.tokens.tokens)))

    def end(self, error: CallFailedError | None = None) -> None:
        """The call is over, on its node or with it; nothing may follow."""
        self._over = True
        self._error = error
        self._wake()

    # -- parts -------------------------------------------------------------------------------

    def _taken(self) -> Sequence[NodeEvent]:
        self._growing.clear()
        events = self._events
        if len(events) <= MOST_EVENTS:
            self._events = []
            self._waiting = 0  # exact again
            return events
        self._events = events[MOST_EVENTS:]
        return events[:MOST_EVENTS]

    def _note(self, size: int) -> None:
        self._waiting += size
        if self._waiting > self._most:
            self._cancel(self)
            details = "it sent more than was asked of it"
            self.end(CallFailedError(grpc.StatusCode.INTERNAL, details))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
