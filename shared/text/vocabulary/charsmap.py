"""The map of characters in a model of SentencePiece: a trie, and the texts that it leads to.

The tokenizers library follows it without looking, so a damaged one would end a request.
"""

from __future__ import annotations

import sys
from array import array

# NFKC's, the largest that is published, has 0.3 MB.
_MAX_BYTES = 4 << 20
_LEAF = 1 << 31


def check_charsmap(charsmap: bytes) -> str | None:
    """What is wrong with a map; ``None`` if nothing is."""
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
    # Where a text may begin: at each character, by its place in bytes.
    starts, place = set(), 0
    for character in texts:
        starts.add(place)
        place += len(character.encode())
    for number, unit in enumerate(units):
        if unit & _LEAF and number:  # the root is followed whatever it is
            continue
        child = number ^ (unit >> 10 << ((unit & 1 << 9) >> 6))
        if child >= len(units) or (unit >> 8 & 1 and (units[child] & ~_LEAF) not in starts):
            return f"leads out of itself at {number}"
    return None
