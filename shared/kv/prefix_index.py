"""Prefix index: from the key of a token prefix to the full block that holds its KV."""

from __future__ import annotations

from collections import OrderedDict

from .published import PrefixDigest


class PrefixIndex:
    """Maps keys to blocks, and orders unreferenced blocks by last use."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.published = PrefixDigest()

    @property
    def idle(self) -> int:
        """The number of cached, unreferenced blocks, which may be evicted."""
        return len(self._idle)

    def find(self, key: bytes) -> int | None:
        return self._blocks.get(key)

    def holds(self, block: int) -> bool:
        return block in self._keys

    def insert(self, key: bytes, block: int) -> None:
        """Index an owned block. The first block of a key stays; a duplicate is not indexed."""
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key
            self.published.add(key)

    def claim(self, block: int) -> None:
        """Mark an idle block as referenced again."""
        del self._idle[block]

    def idle_block(self, block: int) -> None:
        """Mark an indexed block as unreferenced, and most recently used."""
        self._idle[block] = None

    def evict(self) -> int:
        """Forget the least recently used idle block and return it."""
        block, _ = self._idle.popitem(last=False)
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Remove a block that is not idle from the index, if it is indexed."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
            self.published.remove(key)
