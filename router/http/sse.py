"""Server-sent events."""

from __future__ import annotations

from typing import Any

from .encoding import dump


def data_event(value: Any) -> bytes:
    """An event with the JSON of ``value`` as its data."""
    return b"data: " + dump(value) + b"\n\n"
