"""Which full blocks hold the KV of which token prefix.

A block's key chains over all tokens before it, ``key(i) = H(key(i-1), tokens of block i)``, so that
equal keys mean equal prefixes; the chain starts from a salt, so that tenants who must not learn
each other's prompts from timing never share. The hash is cryptographic (BLAKE2b, 16 bytes): a
collision would hand one user another's context.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16


def chain_keys(
    tokens: Sequence[int], block_size: int, salt: str = "", known: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of the full blocks of ``tokens``; ``known`` are the leading ones already computed."""
    keys = list(known)
    parent = keys[-1] if keys else blake2b(salt.encode(), digest_size=KEY_BYTES).digest()
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        content = array("q", tokens[start : start + block_size]).tobytes()
        parent = blake2b(parent + content, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


class PrefixIndex:
    """Maps keys to blocks, and orders the blocks that nobody references by last use."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

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

    def claim(self, block: int) -> None:
        """A sequence references an idle block again."""
        del self._idle[block]

    def idle_block(self, block: int) -> None:
        """The last reference on a remembered block went: it is the most recently used one."""
        self._idle[block] = None

    def evict(self) -> int:
        """Forget the least recently used idle block and return it."""
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._keys.pop(block)]
        return block
