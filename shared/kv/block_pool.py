"""Block pool: the state of every block of the KV cache.

Every block is in exactly one of four states; ``check`` verifies that they add up::

    free      unreferenced, content undefined
    cached    unreferenced, but its content is a known prefix: reusable until evicted
    owned     referenced by one or more sequences
    reserved  to be filled by one transfer

The pool knows no torch and no sequence: callers hold plain block ids and return them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .free_blocks import FreeBlocks
from .prefix_index import PrefixIndex


class OutOfBlocksError(Exception):
    """Not enough blocks are free or evictable; none was taken."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """The number of blocks in each state."""

    free: int
    cached: int
    owned: int
    reserved: int

    @property
    def available(self) -> int:
        """Blocks available for allocation."""
        return self.free + self.cached


class BlockPool:
    """Allocates blocks, counts references, and keeps finished prefixes for reuse.

    At most ``prefix_cache_max_blocks`` unreferenced blocks stay cached (``None``: no limit).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_cache: bool = True,
        prefix_cache_max_blocks: int | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks and block_size must be positive: {num_blocks=}, {block_size=}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = PrefixIndex()
        self._enabled = enable_prefix_cache
        self._max_cached = prefix_cache_max_blocks
        self._free = FreeBlocks(num_blocks)
        self._references: dict[int, int] = {}
        self._reserved: set[int] = set()

    @property
    def keeps_prefixes(self) -> bool:
        """True if finished prefixes are cached."""
        return self._enabled

    def counts(self) -> PoolCounts:
        return PoolCounts(
            len(self._free), self.index.idle, len(self._references), len(self._reserved)
        )

    def check(self) -> None:
        """Raise if a block is in no state or in two. Called when idle and after every test."""
        counts = self.counts()
        total = counts.free + counts.cached + counts.owned + counts.reserved
        owned = self._references.keys()
        overlap = {block for block in owned | self._reserved if block in self._free}
        overlap |= self._reserved & owned
        assert total == self.num_blocks and not overlap, (
            f"{counts} do not add up to {self.num_blocks}, or overlap: {sorted(overlap)}"
        )
        assert all(n > 0 for n in self._references.values()), "an owned block has no reference"

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocate ``count`` blocks for one sequence, evicting cached prefixes if necessary.

        ``after`` is the sequence's last block: the pool tries to continue right after it, because
        attention over consecutive blocks needs no gather.
        """
        blocks = self._take(count, after)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def reserve(self, count: int, after: int | None = None) -> list[int]:
        """Reserve ``count`` blocks for one transfer to fill."""
        blocks = self._take(count, after)
        self._reserved.update(blocks)
        return blocks

    def commit(self, blocks: Iterable[int]) -> None:
        """Make reserved blocks, which a transfer has filled, owned by one sequence."""
        for block in blocks:
            self._reserved.remove(block)
            self._references[block] = 1

    def cancel_reservation(self, blocks: Iterable[int]) -> None:
        """Free reserved blocks that the transfer can no longer write to."""
        for block in blocks:
            self._reserved.remove(block)
            self._free.add(block)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Add a reference to each block of the longest cached prefix of these chained keys."""
        blocks: list[int] = []
        if not self._enabled:
            return blocks
        for key in keys:
            block = self.index.find(key)
            if block is None:
                break
            blocks.append(block)
        self.share(blocks)
        return blocks

    def peek(self, keys: Sequence[bytes]) -> int:
        """Count the leading ``keys`` that are cached, without a reference."""
        count = 0
        while self._enabled and count < len(keys) and self.index.find(keys[count]) is not None:
            count += 1
        return count

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these owned or cached blocks."""
        for block in blocks:
            count = self._references.get(block, 0)
            if count == 0:
                self.index.claim(block)
            self._references[block] = count + 1

    def publish(self, block: int, key: bytes) -> None:
        """Index an owned block, full and computed, for sequences with the same prefix."""
        if block not in self._references:
            raise ValueError(f"block {block} is not owned, so its content is undefined")
        if self._enabled:
            self.index.insert(key, block)

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Stop sharing these owned blocks with further sequences; existing references stay."""
        for block in blocks:
            self.index.forget(block)

    def freed_by(self, tables: Iterable[Sequence[int]]) -> int:
        """The number of blocks that become available once all of these tables are released."""
        counts = Counter(block for table in tables for block in table)
        return sum(self._references[block] == count for block, count in counts.items())

    def release(self, blocks: Sequence[int]) -> None:
        """Release one reference on each block, the last block of a sequence first.

        That order makes the tail of a prefix the first to be evicted: a tail without its head can
        never be matched again.
        """
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count:
                self._references[block] = count
                continue
            del self._references[block]
            if self.index.holds(block):
                self.index.idle_block(block)
            else:
                self._free.add(block)
        self._trim()

    def _trim(self) -> None:
        while self._max_cached is not None and self.index.idle > self._max_cached:
            self._free.add(self.index.evict())

    def _take(self, count: int, after: int | None) -> list[int]:
        if count > len(self._free) + self.index.idle:
            raise OutOfBlocksError(
                f"{count} blocks requested, {len(self._free)} free, {self.index.idle} evictable"
            )
        # All evictions first: blocks evicted together were often neighbours.
        while len(self._free) < count:
            self._free.add(self.index.evict())
        blocks: list[int] = []
        for _ in range(count):
            after = self._free.take(after)
            blocks.append(after)
        return blocks
