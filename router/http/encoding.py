"""JSON of large responses, encoded in pieces: ``json`` would hold the event loop for seconds."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from io import StringIO
from typing import Any

from .slices import TimeSlices

# A piece of either kind is encoded within a millisecond.
TEXT_PIECE = 32 * 1024
NUMBERS_PIECE = 4096
# The size of a write.
WRITE_BYTES = 64 * 1024

# Created once: ``json.dumps`` with options creates one each time.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def dump(value: Any) -> bytes:
    """The JSON of a small value."""
    return _encode(value).encode()


def dump_pieces(value: Any) -> bytes:
    """The JSON of a value whose long parts are ``EncodedArray``."""
    return b"".join(_pieces(value))


class EncodedArray:
    """A JSON array whose items are encoded as they arrive; it holds little more than the JSON."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._data = bytearray()
        self.extend(items)

    def __len__(self) -> int:
        """Bytes, not items."""
        return len(self._data)

    def extend(self, items: Iterable[Any]) -> None:
        encoded = dump(list(items))[1:-1]
        if encoded:
            if self._data:
                self._data += b","
            self._data += encoded

    def pieces(self) -> Iterator[bytes]:
        yield b"["
        with memoryview(self._data) as data:
            for start in range(0, len(data), WRITE_BYTES):
                yield bytes(data[start : start + WRITE_BYTES])
        yield b"]"


async def encode(value: Any) -> list[bytes]:
    """The JSON of a value that may contain ``EncodedArray``, ``array`` and ``StringIO``, in pieces
    to be written in turn."""
    slices = TimeSlices()
    written: list[bytes] = []
    buffer = bytearray()
    for piece in _pieces(value):
        buffer += piece
        if len(buffer) >= WRITE_BYTES:
            written.append(bytes(buffer))
            buffer.clear()
        await slices.checkpoint()
    written.append(bytes(buffer))
    return written


def _pieces(value: Any) -> Iterator[bytes]:
    match value:
        case dict():
            separator = b"{"
            for name, item in value.items():
                yield separator + dump(name) + b":"
                yield from _pieces(item)
                separator = b","
            yield b"}" if value else b"{}"
        case list():
            separator = b"["
            for item in value:
                yield separator
                yield from _pieces(item)
                separator = b","
            yield b"]" if value else b"[]"
        case EncodedArray():
            yield from value.pieces()
        case array():
            yield from _numbers(value)
        case StringIO():
            yield from _pieces(value.getvalue())
        case str() if len(value) > TEXT_PIECE:
            yield b'"'
            for start in range(0, len(value), TEXT_PIECE):
                yield dump(value[start : start + TEXT_PIECE])[1:-1]
            yield b'"'
        case _:
            yield dump(value)


def _numbers(values: array[Any]) -> Iterator[bytes]:
    yield b"["
    for start in range(0, len(values), NUMBERS_PIECE):
        encoded = dump(values[start : start + NUMBERS_PIECE].tolist())[1:-1]
        yield b"," + encoded if start else encoded
    yield b"]"
