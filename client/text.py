"""Text for files and terminals."""

from __future__ import annotations

import json
from typing import Any

# Terminals interpret control characters, which a model or a server may write; only line ends and
# tabs are kept. Halves of surrogate pairs cannot be encoded.
CONTROLS = {
    code: None
    for code in (*range(32), *range(127, 160), *range(0xD800, 0xE000))
    if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """Text without the characters that a terminal interprets."""
    return text.translate(CONTROLS)


def json_text(value: Any) -> str:
    """A value as JSON on one line, with characters beyond ASCII as they are, except halves of
    surrogate pairs: JSON allows them, UTF-8 does not, so they are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()
