"""Server-sent events."""

from __future__ import annotations

from typing import Any

from .encoding import dump
from .long_events import LongEvent


def named_event(name: str, value: Any) -> bytes:
    """An event with a name, and the JSON of ``value`` as its data."""
    return b"event: " + name.encode() + b"\ndata: " + dump(value) + b"\n\n"


def long_event(name: str, value: Any) -> LongEvent:
    """An event with a name, and a value that may be large."""
    return LongEvent(b"event: " + name.encode() + b"\ndata: ", value, b"\n\n")


def long_data_event(value: Any) -> LongEvent:
    """An event whose value may be large, without a name."""
    return LongEvent(b"data: ", value, b"\n\n")


def data_event(value: Any) -> bytes:
    """An event with the JSON of ``value`` as its data."""
    return b"data: " + dump(value) + b"\n\n"
