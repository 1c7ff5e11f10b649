"""The events of many requests on their way to one router: one message for each step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from ...proto import tandem_pb2 as pb

# Limits of one message: a few hundred kilobytes of tokens, a few megabytes of logprobs.
MAX_TOKENS = 8192
MAX_EVENTS = 256
# Tokens that may wait for a router that does not read; an event counts as EVENT_WEIGHT tokens.
MAX_WAITING = 1 << 20
EVENT_WEIGHT = 64


class Outbox:
    """Accepts everything without waiting, so that no request waits for a router that reads slowly.

    ``overflow`` is called once more than ``MAX_WAITING`` tokens wait, because the router has
    stopped reading; whatever comes after is discarded.
    """

    def __init__(self, overflow: Callable[[], object]) -> None:
        self._overflow = overflow
        self._numbers: list[int] = []  # columns, as in the message
        self._choices: list[int] = []
        self._tokens: list[int] = []
        self._events: deque[pb.RequestEvent] = deque()
        self._evented: set[int] = set()  # requests whose tokens must follow a waiting event
        self._ready = asyncio.Event()
        self._empty = asyncio.Event()
        self._closed = self._full = False

    @property
    def waiting(self) -> int:
        """Size of everything that waits, in tokens."""
        return len(self._numbers) + EVENT_WEIGHT * len(self._events)

    def put_tokens(self, number: int, choice: int, tokens: Sequence[int]) -> None:
        """Add tokens without logprobs."""
        if self._full:
            return
        if number in self._evented:
            self.put(number, pb.GenerateEvent(tokens=pb.Tokens(index=choice, tokens=tokens)))
            return
        for token in tokens:
            self._numbers.append(number)
            self._choices.append(choice)
            self._tokens.append(token)
        self._note_put()

    def put(self, number: int, event: pb.GenerateEvent) -> None:
        """Add an event behind all others of its request."""
        self._put(number, pb.RequestEvent(number=number, generated=event))

    def end(self, number: int, status: int = 0, details: str = "") -> None:
        """Add the end of a request."""
        self._put(
            number,
            pb.RequestEvent(number=number, ended=pb.RequestEnd(status=status, details=details)),
        )

    def drop(self, number: int) -> None:
        """Discard everything that waits for a request that the router has cancelled."""
        if self._full or self._closed:
            return  # the stream has ended, with all of its requests
        if number in self._evented:
            self._evented.discard(number)
            self._events = deque(event for event in self._events if event.number != number)
        if number in self._numbers:
            others = [i for i, each in enumerate(self._numbers) if each != number]
            for column in (self._numbers, self._choices, self._tokens):
                column[:] = [column[i] for i in others]

    def close(self) -> None:
        """End ``messages`` once everything is sent."""
        self._closed = True
        self._ready.set()

    async def drain(self) -> None:
        """Wait until everything is sent, before the next part of something large."""
        if self.waiting:
            self._empty.clear()
            await self._empty.wait()

    async def messages(self) -> AsyncIterator[pb.StreamEvents]:
        """Messages with everything that waits, until the outbox is closed."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            while self.waiting:
                yield self._next_message()
            self._empty.set()
            if self._closed:
                return

    def _put(self, number: int, event: pb.RequestEvent) -> None:
        if not self._full:
            self._evented.add(number)
            self._events.append(event)
            self._note_put()

    def _note_put(self) -> None:
        self._ready.set()
        if self.waiting > MAX_WAITING:
            self._full = True
            self._overflow()

    def _next_message(self) -> pb.StreamEvents:
        """Take the next message; events follow once no token waits."""
        numbers, choices, tokens = (
            column[:MAX_TOKENS] for column in (self._numbers, self._choices, self._tokens)
        )
        for column in (self._numbers, self._choices, self._tokens):
            del column[:MAX_TOKENS]
        message = pb.StreamEvents(numbers=numbers, tokens=tokens)
        if any(choices):
            message.choices.extend(choices)
        if not self._numbers:
            for _ in range(min(len(self._events), MAX_EVENTS)):
                message.events.append(self._events.popleft())
            self._evented = {event.number for event in self._events}
        return message
