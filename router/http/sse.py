"""Server-sent events."""

from __future__ import annotations

from typing import Any

from .encoding import dump


def named_event(name: str, value: Any) -> bytes:
    """An event with a name, and the JSON of ``value`` as its data."""
    return b"event: " + name.encode() + b"\ndata: " + dump(value) + b"\n\n"


def data_event(value: Any) -> bytes:
    """An event with the JSON of ``value`` as its data."""
    return b"data: " + dump(value) + b"\n\n"
