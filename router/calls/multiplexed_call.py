"""One of the calls on a ``Decode.Stream``, and its events that the request has not read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ...proto import tandem_pb2 as pb
from ..errors import NodeError
from .node_events import NodeEvent, PlainTokens
from .node_logprobs import listed

# What is read at once takes a few milliseconds to write.
MOST_EVENTS = 64
MOST_TOKENS = 64  # of one event
# Tokens and logprobs that may wait for the client, some 40 MB. The calls of a stream share its flow
# control, so that one which is read slowly cannot hold its node up.
MAX_WAITING = 1 << 20


class MultiplexedCall:
    """A request on a decode node. ``reuses``: its connection was there before it, and may have been
    dead already."""

    def __init__(self, cancel: Callable[[MultiplexedCall], None], *, reuses: bool) -> None:
        self.reuses = reuses
        self._cancel = cancel
        self._events: list[NodeEvent] = []
        self._growing: dict[int, PlainTokens] = {}  # the last waiting event of a choice
        self._waiting = 0  # tokens and logprobs
        self._reader: asyncio.Future[None] | None = None
        self._over = False
        self._error: Exception | None = None

    async def read(self) -> Sequence[NodeEvent]:
        """The next events, all that have arrived; empty at the end. Raises ``CallFailedError``, and
        ``NodeError`` if too many have waited to be read."""
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
        """End the call on its node, unless it has ended."""
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
        self._note(_size(event))

    def end(self, error: Exception | None = None) -> None:
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
        events, self._events = events[:MOST_EVENTS], events[MOST_EVENTS:]
        self._waiting -= sum(map(_size, events))
        return events

    def _note(self, size: int) -> None:
        self._waiting += size
        if self._waiting > MAX_WAITING:
            self._cancel(self)
            self._events = []
            self.end(NodeError("The client reads the response too slowly."))
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _size(event: NodeEvent) -> int:
    """Tokens and logprobs; of a prompt's, which the response keeps in any case, a piece is one."""
    if isinstance(event, PlainTokens):
        return len(event.tokens)
    return 1 + sum(1 + listed(position) for position in event.tokens.logprobs)
