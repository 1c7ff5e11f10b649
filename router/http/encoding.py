"""JSON of large responses, encoded in pieces: ``json`` would hold the event loop for seconds."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from io import StringIO
from itertools import islice
from typing import Any

from .slices import TimeSlices

# A piece of any kind is encoded within a millisecond.
TEXT_PIECE = 32 * 1024
NUMBERS_PIECE = 4096
ITEMS_PIECE = 256
FIELDS_PIECE = 64
# Characters and values that are encoded at once.
AT_ONCE = 4096
_SCALARS = frozenset((int, float, bool, type(None)))
# The size of a write.
WRITE_BYTES = 64 * 1024

# Created once: ``json.dumps`` with options creates one each time.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def dump(value: Any) -> bytes:
    """The JSON of a small value."""
    return _encode(value).encode()


class EncodedArray:
    """A JSON array whose items are encoded as they arrive; it holds little more than the JSON."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._data = bytearray()
        self.extend(items)

    def __len__(self) -> int:
        """Bytes, not items."""
        return len(self._data)

    def extend(self, items: Iterable[Any]) -> None:
        new = list(items)
        if new:
            if self._data:
                self._data += b","
            self._data += dump(new)[1:-1]

    def pieces(self) -> Iterator[bytes]:
        yield b"["
        for start in range(0, len(self._data), WRITE_BYTES):
            yield bytes(self._data[start : start + WRITE_BYTES])
        yield b"]"


async def encode(value: Any) -> list[bytes]:
    """The JSON of a value that may contain ``EncodedArray``, ``array`` and ``StringIO``, in pieces
    to be written in turn."""
    slices = TimeSlices()
    written: list[bytes] = []
    buffer = bytearray()
    for piece in pieces_of(value):
        buffer += piece
        if len(buffer) >= WRITE_BYTES:
            written.append(bytes(buffer))
            buffer.clear()
        await slices.checkpoint()
    written.append(bytes(buffer))
    return written


def pieces_of(value: Any) -> Iterator[bytes]:
    """The JSON of a value that may contain ``EncodedArray``, ``array`` and ``StringIO``, in pieces
    of which each takes a millisecond at most."""
    if _is_small(value):
        yield dump(value)
        return
    match value:
        case dict():
            yield from _fields(value)
        case list():
            yield from _items(value)
        case EncodedArray():
            yield from value.pieces()
        case array():
            yield from _numbers(value)
        case StringIO():
            yield from pieces_of(value.getvalue())
        case str():
            yield b'"'
            for start in range(0, len(value), TEXT_PIECE):
                yield dump(value[start : start + TEXT_PIECE])[1:-1]
            yield b'"'
        case _:
            yield dump(value)


def _fields(values: dict[str, Any]) -> Iterator[bytes]:
    separator = b"{"
    fields = iter(values.items())
    while some := dict(islice(fields, FIELDS_PIECE)):
        if _is_small(some):
            yield separator + dump(some)[1:-1]
            separator = b","
            continue
        for name, item in some.items():
            yield separator
            yield from pieces_of(name)
            yield b":"
            yield from pieces_of(item)
            separator = b","
    yield b"}"


def _items(values: list[Any]) -> Iterator[bytes]:
    separator = b"["
    for start in range(0, len(values), ITEMS_PIECE):
        some = values[start : start + ITEMS_PIECE]
        if _is_small(some):
            yield separator + dump(some)[1:-1]
            separator = b","
            continue
        for item in some:
            yield separator
            yield from pieces_of(item)
            separator = b","
    yield b"]"


def _numbers(values: array[Any]) -> Iterator[bytes]:
    yield b"["
    for start in range(0, len(values), NUMBERS_PIECE):
        encoded = dump(values[start : start + NUMBERS_PIECE].tolist())[1:-1]
        yield b"," + encoded if start else encoded
    yield b"]"


def _is_small(value: Any) -> bool:
    """True for a value that C encodes at once."""
    left, waiting = AT_ONCE, [value]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if kind is str:
            left -= len(item)
        elif kind is dict or kind is list:
            left -= len(item)
            if left < 0:
                return False
            waiting.extend(item)
            if kind is dict:
                waiting.extend(item.values())
        elif kind not in _SCALARS:
            return False
        if left < 0:
            return False
    return True
