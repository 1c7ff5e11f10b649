"""Sizes of JSON values, and their text: in C, ``json`` would stop all threads while it encodes a
large one."""

from __future__ import annotations

import json
from typing import Any

from ..http.json_body import values_in

# Characters and values that C encodes within a millisecond or two.
MAX_IN_C = 128 * 1024
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def size_of(value: Any) -> int:
    """The characters and values of a value, names of objects included."""
    return sum(map(_size, values_in(value)))


def fits(value: Any, most: int) -> bool:
    """True if a value has at most ``most`` characters and values, names of objects included."""
    for item in values_in(value):
        most -= _size(item)
        if most < 0:
            return False
    return True


def _size(item: Any) -> int:
    return len(item) if isinstance(item, (str, list, dict)) else 1


def json_text(value: Any) -> str:
    """A value as JSON. A large one is encoded in Python, which other threads can interrupt."""
    if fits(value, MAX_IN_C):
        return _ENCODER.encode(value)
    return "".join(_ENCODER.iterencode(value))
