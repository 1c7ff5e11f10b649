"""Events of a stream that are encoded while they are written, because they may be large."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from .encoding import WRITE_BYTES, pieces_of
from .slices import TimeSlices


@dataclass(frozen=True, slots=True)
class LongEvent:
    """The JSON of ``value`` between two texts. The value is as for ``pieces_of``, or a function
    that makes it, in a thread; it must not change until the event is written."""

    head: bytes
    value: Any
    tail: bytes

    def pieces(self) -> Iterator[bytes]:
        value = self.value() if callable(self.value) else self.value
        return chain((self.head,), pieces_of(value), (self.tail,))


EventParts = list[bytes | LongEvent]
# What a response writes at once: complete events.
Events = bytes | EventParts


def joined(made: Iterable[Events]) -> Events:
    """Events one after the other."""
    parts: EventParts = []
    for events in made:
        if isinstance(events, bytes):
            parts.append(events)
        else:
            parts += events
    return _whole(parts)


async def written(events: Events) -> AsyncIterator[bytes]:
    """The bytes of events, in pieces that are written in turn: each has whole events, or a part of
    a single one."""
    if isinstance(events, bytes):
        yield events
        return
    slices = TimeSlices()
    buffer = bytearray()
    for part in events:
        if isinstance(part, bytes):
            buffer += part
            continue
        if callable(part.value):
            part = LongEvent(part.head, await asyncio.to_thread(part.value), part.tail)
        event, in_parts = bytearray(), False
        for piece in part.pieces():
            event += piece
            if len(event) + len(buffer) >= WRITE_BYTES and buffer:
                yield bytes(buffer)
                buffer.clear()
            if len(event) >= WRITE_BYTES:
                yield bytes(event)
                event.clear()
                in_parts = True
            await slices.checkpoint()
        if in_parts:
            yield bytes(event)
        else:
            buffer += event
    yield bytes(buffer)


def _whole(parts: EventParts) -> Events:
    """As few parts as possible."""
    if len(parts) == 1 and isinstance(parts[0], bytes):
        return parts[0]
    plain = [part for part in parts if isinstance(part, bytes)]
    return b"".join(plain) if len(plain) == len(parts) else parts
