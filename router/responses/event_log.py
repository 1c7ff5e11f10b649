"""The events of a response in the background, which clients may read from any event on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import chain

from ..http.access_log import AccessRecord
from ..http.encoding import WRITE_BYTES
from ..http.memory_budget import MemoryShare

END = b"\n\n"
# Events in one write to a client that catches up.
BURST = 64


class EventLog:
    """Takes what would be written to a client. ``access`` is the record of the request that writes;
    ``started`` is true from the first event on."""

    def __init__(self, access: AccessRecord) -> None:
        self.access = access
        self.started = False
        self.ended = False
        self.bytes = 0
        self._events: list[tuple[bytes, ...]] = []  # each in pieces
        self._begun: list[bytes] = []  # the pieces of one whose end has not come
        self._memory: MemoryShare | None = None
        self._more = asyncio.Event()

    def hold(self, memory: MemoryShare) -> None:
        """Count events from now on in ``memory``."""
        self._memory = memory

    async def start_stream(self) -> None:
        self.started = True

    async def write(self, events: bytes) -> None:
        """Keep events, each by its number. JSON has no empty lines. Of a long event a piece comes
        at a time."""
        if not events.endswith(END):
            self._begun += [events] if events else []
        elif self._begun:
            self._events.append((*self._begun, events))
            self._begun.clear()
        else:
            self._events += [(event + END,) for event in events.split(END)[:-1]]
        self.bytes += len(events)
        if self._memory is not None:
            self._memory.take(len(events))
        self._wake()

    async def end_stream(self, events: bytes = b"") -> None:
        await self.write(events)
        self.end()

    def end(self) -> None:
        """No more events follow."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def after(self, number: int) -> AsyncGenerator[bytes, None]:
        """The events after that of ``number``, until the last one."""
        at = number + 1
        while True:
            while at < len(self._events):
                burst = self._events[at : at + BURST]
                at += len(burst)
                for piece in _together(burst):
                    yield piece
            if self.ended:
                return
            await self._more.wait()


def _together(events: Sequence[tuple[bytes, ...]]) -> Iterator[bytes]:
    """The bytes of events in as few pieces as are written at once."""
    buffer = bytearray()
    for piece in chain.from_iterable(events):
        buffer += piece
        if len(buffer) >= WRITE_BYTES:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)
