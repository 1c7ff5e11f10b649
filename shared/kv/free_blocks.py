"""Free blocks of a pool, allocated such that a sequence's blocks are consecutive.

Attention on a CPU reads consecutive blocks in place and must gather others first, which at long
contexts takes as long as the attention. So a sequence continues in the block right after its last
one if that is free; otherwise it starts a wholly free stretch, which gives it room to grow.
"""

from __future__ import annotations

_STRETCH = 16


class FreeBlocks:
    """A set of block ids. Every operation takes constant time."""

    def __init__(self, num_blocks: int) -> None:
        # In the order in which they were freed. The newest is taken first: a sequence's blocks are
        # freed from its tail to its head, and so reused from head to tail.
        self._free = dict.fromkeys(reversed(range(num_blocks)))
        self._in_use = [0] * -(-num_blocks // _STRETCH)
        self._whole = dict.fromkeys(reversed(range(len(self._in_use))))

    def __len__(self) -> int:
        return len(self._free)

    def __contains__(self, block: object) -> bool:
        return block in self._free

    def add(self, block: int) -> None:
        """Add a freed block."""
        self._free[block] = None
        stretch = block // _STRETCH
        self._in_use[stretch] -= 1
        if not self._in_use[stretch]:
            self._whole[stretch] = None

    def take(self, after: int | None) -> int:
        """Take a block for the sequence whose last block is ``after``. There must be a free one."""
        block = self._choose(after)
        stretch = block // _STRETCH
        self._in_use[stretch] += 1
        self._whole.pop(stretch, None)
        return block

    def _choose(self, after: int | None) -> int:
        if after is not None and after + 1 in self._free:
            block = after + 1
        elif self._whole:
            # popitem, because looking up a dict's last key repeatedly walks over deleted ones.
            block = self._whole.popitem()[0] * _STRETCH
        else:
            return self._free.popitem()[0]
        del self._free[block]
        return block
