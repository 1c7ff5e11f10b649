"""The arguments of calls that models have written."""

from __future__ import annotations

from typing import Any

from ..http.json_body import parse_text


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments as an object; an empty one if they are none, as those of a call that was cut
    off. Takes long for long ones: run it in a thread."""
    try:
        value = parse_text(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def usable_arguments(text: str) -> dict[str, Any]:
    """The arguments as an object: models write invalid JSON too, which must not make a conversation
    unusable."""
    try:
        value = parse_text(text or "{}")
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"arguments": value}
