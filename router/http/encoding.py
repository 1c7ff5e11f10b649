"""The JSON of responses, and server-sent events.

Encoded by msgspec: ``json`` would block the event loop for ten times as long.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from io import StringIO
from typing import Any

import msgspec

# Items of an array that are converted to Python objects at once.
NUMBERS_AT_ONCE = 4096


class EncodedArray:
    """A JSON array whose items are encoded as they arrive; it holds little more than the JSON."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._data = bytearray()
        self.extend(items)

    def __len__(self) -> int:
        """Bytes of JSON, not items."""
        return len(self._data)

    def extend(self, items: Iterable[Any]) -> None:
        new = list(items)
        if new:
            if self._data:
                self._data += b","
            self._data += dump(new)[1:-1]

    def json(self) -> bytes:
        return b"".join((b"[", self._data, b"]"))


def encode_numbers(numbers: array[Any]) -> EncodedArray:
    """The JSON of ``numbers``, encoded once for a response that has them several times."""
    encoded = EncodedArray()
    for start in range(0, len(numbers), NUMBERS_AT_ONCE):
        encoded.extend(numbers[start : start + NUMBERS_AT_ONCE])
    return encoded


def _encodable(value: Any) -> Any:
    """The replacement for a value of a type that msgspec does not know."""
    match value:
        case EncodedArray():
            return msgspec.Raw(value.json())
        case array():
            return msgspec.Raw(encode_numbers(value).json())
        case StringIO():
            return value.getvalue()
    raise TypeError(f"a {type(value).__name__} is no JSON")


_encoder = msgspec.json.Encoder(enc_hook=_encodable)


def dump(value: Any) -> bytes:
    """The JSON of a value that may contain ``EncodedArray``, ``array`` and ``StringIO``."""
    return _encoder.encode(value)


def named_event(name: str, value: Any) -> bytes:
    """A server-sent event with a name, and the JSON of ``value`` as its data."""
    return b"event: " + name.encode() + b"\ndata: " + dump(value) + b"\n\n"


def data_event(value: Any) -> bytes:
    """A server-sent event with the JSON of ``value`` as its data."""
    return b"data: " + dump(value) + b"\n\n"
