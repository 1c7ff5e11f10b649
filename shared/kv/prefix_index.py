"""Which full blocks hold the KV of which token prefix, by the keys of ``prefix_keys.py``."""

from __future__ import annotations

from collections import OrderedDict

from .published import PrefixDigest


class PrefixIndex:
    """Maps keys to blocks, and orders the blocks that nobody references by last use."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.published = PrefixDigest()

    @property
    def idle(self) -> int:
        """How many blocks are cached and unreferenced, so that eviction may take them."""
        return len(self._idle)

    def find(self, key: bytes) -> int | None:
        return self._blocks.get(key)

    def holds(self, block: int) -> bool:
        return block in self._keys

    def insert(self, key: bytes, block: int) -> None:
        """Remember an owned block. The first block of a key stays: a twin is simply not indexed."""
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key
            self.published.add(key)

    def claim(self, block: int) -> None:
        """A sequence references an idle block again."""
        del self._idle[block]

    def idle_block(self, block: int) -> None:
        """The last reference on a remembered block went: it is the most recently used one."""
        self._idle[block] = None

    def evict(self) -> int:
        """Forget the least recently used idle block and return it."""
        block, _ = self._idle.popitem(last=False)
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Find this block, which is not idle, no longer; one that is not here is no error."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
            self.published.remove(key)
