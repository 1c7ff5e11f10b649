"""JSON for files and terminals."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any) -> str:
    """A value on one line, with other alphabets as they are. Half a surrogate pair, which JSON may
    have and UTF-8 has no place for, is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()
