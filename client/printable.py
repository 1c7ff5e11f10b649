"""Text that is safe to show on a terminal."""

from __future__ import annotations

# Terminals act on control characters, which a model or a server may write: only line ends and tabs
# pass.
# Halves of surrogate pairs cannot be written.
CONTROLS = {
    code: None
    for code in (*range(32), *range(127, 160), *range(0xD800, 0xE000))
    if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """Text without the characters on which a terminal acts."""
    return text.translate(CONTROLS)
