"""Sizes of JSON values, and their text. The C encoder of ``json`` holds the GIL, so large values
are encoded in Python."""

from __future__ import annotations

import json
from typing import Any

from ..http.json_body import values_in

# Characters and values that the C encoder writes within two milliseconds.
MAX_IN_C = 128 * 1024
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def size_of(value: Any) -> int:
    """The number of characters and values in a JSON value, including names of fields."""
    return sum(map(_size, values_in(value)))


def fits(value: Any, limit: int) -> bool:
    """``size_of(value) <= limit``, without counting further than that."""
    room = limit
    for item in values_in(value):
        room -= _size(item)
        if room < 0:
            return False
    return True


def _size(item: Any) -> int:
    return len(item) if isinstance(item, (str, list, dict)) else 1


def json_text(value: Any) -> str:
    """A value as JSON. A large one is encoded in Python, so that other threads can run."""
    if fits(value, MAX_IN_C):
        return _ENCODER.encode(value)
    return "".join(_ENCODER.iterencode(value))
