"""Which of many nodes may hold a prefix, without asking each of them.

A table with a row for each of many groups of keys, and a bit for each node in a row: Bloom filters
side by side, so that one row says which nodes may hold a key. It may name a node that does not hold
it (22% for one key of a full set, far less for several), and never leaves one out. It takes 8 KiB
a node.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

# A key's row is its upper 16 bits, which a view of many keys gives without a shift for each one.
ROWS = 1 << 16
SHIFT = 64 - 16
# Bytes of a row that lie together. In one table for all nodes, those of a column would lie too far
# apart for the processor's caches.
WIDTH = 16
# More keys are entered into a copy of a column, which then goes back whole.
FEW = 512
# Bits cannot be cleared one by one; a column is written anew after so many removals.
MAX_STALE = 4096
# Nodes that are looked at closely at one depth of a prompt, besides those that are found.
MAX_LOOKS = 32

Owner = TypeVar("Owner")
Sample = list[tuple[int, int]]


class PrefixTable(Generic[Owner]):
    """Owns the table. Each node has a column, by its slot."""

    def __init__(self) -> None:
        self._parts: list[bytearray] = []  # of the table, each for 8 * WIDTH columns, row by row
        self._columns: list[Column[Owner] | None] = []
        self._shapes: dict[tuple[int, int], int] = {}

    def column(self, owner: Owner) -> Column[Owner]:
        """A new one, empty; its owner gives it back with ``release``."""
        slot = next((at for at, used in enumerate(self._columns) if used is None), None)
        if slot is None:
            slot = len(self._columns)
            self._columns.append(None)
            if slot >= 8 * WIDTH * len(self._parts):
                self._parts.append(bytearray(ROWS * WIDTH))
        made = self._columns[slot] = Column(self, slot, owner)
        return made

    def find(
        self,
        sample_of: Callable[[int, int], Sample],
        holds: Callable[[Owner, int], bool],
        limit: int,
        turn: int,
    ) -> list[Owner]:
        """Owners that hold the most of a prompt first, then some that hold less of it.

        ``sample_of`` gives the prompt's keys for a block size and a stride; ``holds`` has the last
        word on one of them. ``turn`` varies who is found where many hold the same.
        """
        found: dict[int, Owner] = {}
        for (block_size, stride), slots in self._shapes.items():
            sample = sample_of(block_size, stride)
            if sample:  # whoever holds anything of the prompt holds its beginning
                slots &= self._row(sample[0][1])
            for depth in self._depths(sample, slots):
                slots_there = self._at(sample, depth, slots)
                for slot in _some(slots_there, turn, MAX_LOOKS):
                    column = self._columns[slot]
                    if slot in found or column is None:
                        continue
                    if holds(column.owner, sample[depth][1]):
                        found[slot] = column.owner
                    if len(found) >= limit:
                        return list(found.values())
        return list(found.values())

    def _depths(self, sample: Sample, slots: int) -> Iterator[int]:
        """Places in a sample: the last that anybody may hold, then half as deep, and so on."""
        low, high = 0, len(sample)
        while low < high:  # the ends of prefixes are evicted before their beginnings
            middle = (low + high) // 2
            if self._at(sample, middle, slots):
                low = middle + 1
            else:
                high = middle
        while low:
            yield low - 1
            low //= 2

    def _at(self, sample: Sample, depth: int, slots: int) -> int:
        """Those of ``slots`` that may hold the prompt to this depth: three keys and its first are
        seldom all wrong."""
        for place in {depth // 2, max(0, depth - 1), depth}:
            slots &= self._row(sample[place][1])
        return slots

    def _row(self, key: int) -> int:
        start = (key >> SHIFT) * WIDTH
        row = b"".join([part[start : start + WIDTH] for part in self._parts])
        return int.from_bytes(row, "little")


class Column(Generic[Owner]):
    """What one node may hold."""

    def __init__(self, holders: PrefixTable[Owner], slot: int, owner: Owner) -> None:
        self.owner = owner
        self._holders = holders
        self._slot = slot
        self._part = holders._parts[slot // (8 * WIDTH)]
        self._place, self._bit = (slot >> 3) % WIDTH, 1 << (slot & 7)
        self._shape: tuple[int, int] | None = None
        self._stale = 0
        self._clean = True  # no bit of the column is set

    def shape(self, block_size: int, stride: int) -> None:
        """Of which blocks its keys are; a block size of 0 stands for none."""
        shape = (block_size, stride) if block_size else None
        if shape == self._shape:
            return
        shapes, bit = self._holders._shapes, 1 << self._slot
        if self._shape is not None:
            shapes[self._shape] &= ~bit
            if not shapes[self._shape]:
                del shapes[self._shape]
        if shape is not None:
            shapes[shape] = shapes.get(shape, 0) | bit
        self._shape = shape

    def add(self, keys: array[int]) -> None:
        self._clean = self._clean and not keys
        if len(keys) > FEW:
            self._enter(keys, self._bytes())
            return
        for key in keys:
            self._part[(key >> SHIFT) * WIDTH + self._place] |= self._bit

    def outdated(self, count: int, keys: Callable[[], array[int]]) -> None:
        """So many bits stand for keys that are not held; ``keys()`` are those that are."""
        self._stale += count
        if self._stale > MAX_STALE:
            self.replace(keys())

    def replace(self, keys: array[int]) -> None:
        if self._clean:
            self.add(keys)
        else:
            without = bytes(byte & ~self._bit for byte in range(256))
            self._enter(keys, self._bytes().translate(without))
        self._stale, self._clean = 0, not keys

    def release(self) -> None:
        self.shape(0, 0)
        self.replace(array("Q"))
        self._holders._columns[self._slot] = None

    def _bytes(self) -> bytearray:
        """A copy of the bytes with this column's bits, and those of seven others, a byte a row."""
        return self._part[self._place :: WIDTH]

    def _enter(self, keys: array[int], column: bytearray) -> None:
        bit = self._bit
        for row in memoryview(keys).cast("B").cast("H")[3::4]:
            column[row] |= bit
        self._part[self._place :: WIDTH] = column


def _some(bits: int, turn: int, count: int) -> Iterator[int]:
    """At most ``count`` of the set bits, from a place on that ``turn`` shifts."""
    start = turn * count % max(1, bits.bit_length())
    for part, base in ((bits >> start, start), (bits & (1 << start) - 1, 0)):
        while part and count:
            lowest = part & -part
            yield base + lowest.bit_length() - 1
            part ^= lowest
            count -= 1
