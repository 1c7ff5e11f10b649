"""The events of a response in the background, which clients may read from any event on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from ..http.access_log import AccessRecord
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
        self._events: list[bytes] = []
        self._memory: MemoryShare | None = None
        self._more = asyncio.Event()

    def hold(self, memory: MemoryShare) -> None:
        """Count events from now on in ``memory``."""
        self._memory = memory

    async def start_stream(self) -> None:
        self.started = True

    async def write(self, events: bytes) -> None:
        """Keep events, each by its number. JSON has no empty lines."""
        for event in events.split(END)[:-1]:
            self._events.append(event + END)
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
                yield b"".join(burst)
            if self.ended:
                return
            await self._more.wait()
