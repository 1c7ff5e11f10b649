"""SentencePiece's table of characters and what they are replaced by, as files have it compiled."""

from __future__ import annotations

import sys
from array import array

# Bits of a unit of the trie.
_IS_VALUE, _HAS_VALUE, _WIDE = 1 << 31, 1 << 8, 1 << 9


def is_valid(table: bytes) -> bool:
    """Return whether every search in a table ends in it: the library that reads one panics instead.

    A table has the size of a trie in bytes, the trie, and texts that end with a zero byte. A unit
    of the trie (a double array, as Darts-clone makes it) has the place of its children relative to
    its own, of which a byte chooses one; the zeroth is a value, the place of a text.
    """
    size = int.from_bytes(table[:4], "little")
    trie, texts = table[4 : 4 + size], table[4 + size :]
    if not size or size % 4 or len(trie) < size or not texts.endswith(b"\0"):
        return False
    try:
        texts.decode()
    except UnicodeDecodeError:
        return False
    units = array("I", trie)
    if sys.byteorder == "big":
        units.byteswap()
    return all(
        unit & _IS_VALUE or _leads_inside(place, unit, units, texts)
        for place, unit in enumerate(units)
    )


def _leads_inside(place: int, unit: int, units: array[int], texts: bytes) -> bool:
    child = place ^ (unit >> 10) << ((unit & _WIDE) >> 6)
    if child | 255 >= len(units):
        return False
    if not unit & _HAS_VALUE:
        return True
    text = units[child] & (_IS_VALUE - 1)
    # Bytes after the first of a character have other highest bits.
    return text < len(texts) and texts[text] & 0xC0 != 0x80
