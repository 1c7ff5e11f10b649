"""SentencePiece's character map: a trie, and the replacement texts that its leaves point to.

The tokenizers library follows it unchecked, so a damaged map would crash during a request.
"""

from __future__ import annotations

import sys
from array import array

# The largest published map, NFKC, has 0.3 MB.
_MAX_BYTES = 4 << 20
_LEAF = 1 << 31


def check_charsmap(charsmap: bytes) -> str | None:
    """Return the problem of a map, or ``None``."""
    size = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) > _MAX_BYTES:
        return f"has {len(charsmap)} bytes; supported: at most {_MAX_BYTES}"
    if not size or size % 1024 or 4 + size > len(charsmap):
        return "is truncated"
    units = array("I", charsmap[4 : 4 + size])
    if sys.byteorder == "big":
        units.byteswap()
    try:
        texts = charsmap[4 + size :].decode()
    except UnicodeDecodeError:
        return "is not UTF-8"
    if not texts.endswith("\0"):
        return "is truncated"
    # Byte offsets at which a text may begin: those of characters.
    starts, place = set(), 0
    for character in texts:
        starts.add(place)
        place += len(character.encode())
    for number, unit in enumerate(units):
        if unit & _LEAF and number:  # the library never takes the root for a leaf
            continue
        child = number ^ (unit >> 10 << ((unit & 1 << 9) >> 6))
        if child >= len(units) or (unit >> 8 & 1 and (units[child] & ~_LEAF) not in starts):
            return f"unit {number} points outside the map"
    return None
