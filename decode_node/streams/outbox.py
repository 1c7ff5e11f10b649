"""The events of many calls on their way to one router, in one message for all that a step makes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from ...proto import tandem_pb2 as pb

# Of one message: a few hundred kilobytes, and for events with logprobs a few megabytes.
MOST_TOKENS = 8192
MOST_EVENTS = 256
# Tokens that may wait for a router that does not read; an event counts as EVENT_WEIGHT of them.
MOST_WAITING = 1 << 20
EVENT_WEIGHT = 64


class Outbox:
    """Takes everything at once, so that no call waits for a router that reads slowly.

    ``overflow`` is called when too much waits, because the router has stopped reading; from then on
    nothing more is taken.
    """

    def __init__(self, overflow: Callable[[], object]) -> None:
        self._overflow = overflow
        self._calls: list[int] = []  # columns, as of the message
        self._choices: list[int] = []
        self._tokens: list[int] = []
        self._events: deque[pb.CallEvent] = deque()
        self._evented: set[int] = set()  # calls with waiting events, which their tokens follow
        self._ready = asyncio.Event()
        self._empty = asyncio.Event()
        self._closed = self._full = False

    @property
    def waiting(self) -> int:
        """Size of all that waits, in tokens."""
        return len(self._calls) + EVENT_WEIGHT * len(self._events)

    def put_tokens(self, call: int, choice: int, tokens: Sequence[int]) -> None:
        """Add tokens without logprobs."""
        if self._full:
            return
        if call in self._evented:
            self.put(call, pb.GenerateEvent(tokens=pb.Tokens(index=choice, tokens=tokens)))
            return
        for token in tokens:
            self._calls.append(call)
            self._choices.append(choice)
            self._tokens.append(token)
        self._note_put()

    def put(self, call: int, event: pb.GenerateEvent) -> None:
        """Add an event behind all others of its call."""
        self._put(call, pb.CallEvent(call=call, generated=event))

    def end(self, call: int, status: int = 0, details: str = "") -> None:
        """Add the end of a call."""
        self._put(call, pb.CallEvent(call=call, ended=pb.CallEnd(status=status, details=details)))

    def drop(self, call: int) -> None:
        """Forget what waits of a call: the router wants no more of it."""
        if self._full or self._closed:
            return  # its stream has ended, with all of its calls
        if call in self._evented:
            self._evented.discard(call)
            self._events = deque(event for event in self._events if event.call != call)
        if call in self._calls:
            kept = [i for i, each in enumerate(self._calls) if each != call]
            for column in (self._calls, self._choices, self._tokens):
                column[:] = [column[i] for i in kept]

    def close(self) -> None:
        """End ``messages`` once all has been taken."""
        self._closed = True
        self._ready.set()

    async def emptied(self) -> None:
        """Wait until nothing waits, before the next part of something large."""
        if self.waiting:
            self._empty.clear()
            await self._empty.wait()

    async def messages(self) -> AsyncIterator[pb.StreamEvents]:
        """Messages with all that waits, until the outbox is closed."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            while self.waiting:
                yield self._taken()
            self._empty.set()
            if self._closed:
                return

    def _put(self, call: int, event: pb.CallEvent) -> None:
        if not self._full:
            self._evented.add(call)
            self._events.append(event)
            self._note_put()

    def _note_put(self) -> None:
        self._ready.set()
        if self.waiting > MOST_WAITING:
            self._full = True
            self._overflow()

    def _taken(self) -> pb.StreamEvents:
        """The next message, with what waits: events only behind all tokens."""
        calls, choices, tokens = (
            column[:MOST_TOKENS] for column in (self._calls, self._choices, self._tokens)
        )
        for column in (self._calls, self._choices, self._tokens):
            del column[:MOST_TOKENS]
        message = pb.StreamEvents(calls=calls, tokens=tokens)
        if any(choices):
            message.choices.extend(choices)
        if not self._calls:
            for _ in range(min(len(self._events), MOST_EVENTS)):
                message.events.append(self._events.popleft())
            self._evented = {event.call for event in self._events}
        return message
