"""The arguments of calls that models have written."""

from __future__ import annotations

import json
from typing import Any


def usable_arguments(text: str) -> dict[str, Any]:
    """The arguments as an object: models write invalid JSON too, which must not make a conversation
    unusable."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}
