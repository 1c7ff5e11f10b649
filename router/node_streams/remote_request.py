"""One request on a ``Decode.Stream``, and its events that are still unread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ...proto import tandem_pb2 as pb
from ..errors import NodeError
from .events import NodeEvent, PlainTokens
from .logprobs import count_alternatives

# Tokens and logprobs read at once, which take a few milliseconds to format.
MAX_READ = 2048
MAX_EVENT_TOKENS = 64
# Unread tokens and logprobs of one request, besides the prompt's: some 40 MB. The requests of a
# stream share its flow control, so a slow client must not hold up its node.
MAX_UNREAD = 1 << 20


class RemoteRequest:
    """A request on a decode node. ``reuses``: its connection existed before, and may already have
    been dead."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        cancel: Callable[[RemoteRequest], None],
        *,
        reuses: bool,
    ) -> None:
        self.reuses = reuses
        self._cancel = cancel
        self._events: list[NodeEvent] = []
        self._growing: dict[int, PlainTokens] = {}  # the last unread event of a choice
        self._unread = 0  # tokens and logprobs
        of_prompt = len(request.prompt) * (1 + request.sampling.prompt_logprobs)
        self._max_unread = MAX_UNREAD + of_prompt
        self._reader: asyncio.Future[None] | None = None
        self._over = False
        self._error: Exception | None = None

    async def read(self) -> Sequence[NodeEvent]:
        """All events that have arrived since the last read; empty at the end. Raises
        ``RequestFailedError``, and ``NodeError`` if too many are unread."""
        if self._events or self._over:
            # The request is behind: let others run first, while more events arrive.
            await asyncio.sleep(0)
        else:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._events:
            return self._take()
        if self._error is not None:
            raise self._error
        return ()

    def cancel(self) -> None:
        """Cancel the request on its node, unless it has ended."""
        if not self._over:
            self._cancel(self)

    # -- for the stream ----------------------------------------------------------------------

    def add_token(self, choice: int, token: int) -> None:
        """Add a token. Unread tokens of a choice are merged into one event."""
        if self._over:
            return
        last = self._growing.get(choice)
        if last is not None and len(last.tokens) < MAX_EVENT_TOKENS:
            last.tokens.append(token)
        else:
            last = self._growing[choice] = PlainTokens(choice, [token])
            self._events.append(last)
        self._count(1)

    def add(self, event: pb.GenerateEvent) -> None:
        self._growing.clear()
        self._events.append(event)
        self._count(_size(event))

    def end(self, error: Exception | None = None) -> None:
        """End the request; no events may follow."""
        self._over = True
        self._error = error
        self._wake()

    # -- parts -------------------------------------------------------------------------------

    def _take(self) -> Sequence[NodeEvent]:
        self._growing.clear()
        if self._unread <= MAX_READ:
            events, self._events, self._unread = self._events, [], 0
            return events
        count = size = 0
        while size < MAX_READ:
            size += _size(self._events[count])
            count += 1
        events, self._events = self._events[:count], self._events[count:]
        self._unread -= size
        return events

    def _count(self, size: int) -> None:
        self._unread += size
        if self._unread > self._max_unread:
            self._cancel(self)
            self._events = []
            self.end(NodeError("The client reads the response too slowly."))
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _size(event: NodeEvent) -> int:
    """Its number of tokens and logprobs, at least 1."""
    if isinstance(event, PlainTokens):
        return len(event.tokens)
    positions = event.tokens.logprobs or event.prompt_logprobs.positions
    return max(1, sum(1 + count_alternatives(position) for position in positions))
