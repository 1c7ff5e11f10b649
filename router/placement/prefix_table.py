"""A table of the nodes that may hold a prefix, searched without a lookup in each node.

Each row stands for a group of keys and has a bit for each node: Bloom filters side by side, so that
one row gives all nodes that may hold a key. False positives are possible (22% for one key of a full
set, far fewer for several), false negatives are not. The table takes 8 KiB for each node.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

# A key's row is its upper 16 bits, which a strided view yields for many keys without shifts.
ROWS = 1 << 16
SHIFT = 64 - 16
# Bytes of a row in one part of the table. In a single part for all nodes, the bytes of a column
# would be too far apart for the processor's caches.
WIDTH = 16
# More keys than this are entered into a copy of the column, which then replaces it.
FEW = 512
# Removals after which a column is rewritten, because single bits cannot be cleared.
MAX_STALE = 4096
# Candidates to check at each depth of a prompt.
MAX_LOOKS = 32
# False positives after which the search ends: those of the beginning of a prompt that no owner
# holds.
MAX_MISSES = 8

Owner = TypeVar("Owner")
Sample = list[tuple[int, int]]


class PrefixTable(Generic[Owner]):
    """A table with a column for each owner, by slot."""

    def __init__(self) -> None:
        self._parts: list[bytearray] = []  # each for 8 * WIDTH columns, row by row
        self._columns: list[Column[Owner] | None] = []
        self._shapes: dict[tuple[int, int], int] = {}

    def column(self, owner: Owner) -> Column[Owner]:
        """A new, empty column; ``release`` returns it."""
        slot = next((i for i, column in enumerate(self._columns) if column is None), None)
        if slot is None:
            slot = len(self._columns)
            self._columns.append(None)
            if slot >= 8 * WIDTH * len(self._parts):
                self._parts.append(bytearray(ROWS * WIDTH))
        column = self._columns[slot] = Column(self, slot, owner)
        return column

    def find(
        self,
        sample_of: Callable[[int, int], Sample],
        holds: Callable[[Owner, int], bool],
        limit: int,
        turn: int,
    ) -> list[Owner]:
        """Up to ``limit`` owners, those that hold the most of a prompt.

        ``sample_of`` yields the prompt's keys for a block size and a stride; ``holds`` checks one
        of them. ``turn`` varies the result if many owners hold the same.
        """
        owners: dict[int, Owner] = {}
        misses = 0
        for (block_size, stride), slots in self._shapes.items():
            search = _Search(self, sample_of(block_size, stride), slots)
            for depth in search.depths(limit):
                for slot in _some(search.slots_at(depth), turn, MAX_LOOKS):
                    column = self._columns[slot]
                    if slot in owners or column is None:
                        continue
                    if holds(column.owner, search.key(depth)):
                        owners[slot] = column.owner
                    else:
                        misses += 1
                    if len(owners) >= limit or misses >= MAX_MISSES:
                        return list(owners.values())
        return list(owners.values())

    def _row(self, key: int) -> int:
        start = (key >> SHIFT) * WIDTH
        row = b"".join([part[start : start + WIDTH] for part in self._parts])
        return int.from_bytes(row, "little")


class _Search:
    """The search for one prompt among the columns of one shape."""

    def __init__(self, table: PrefixTable[Any], sample: Sample, slots: int) -> None:
        self._table = table
        self._sample = sample
        self._slots = slots
        self._rows: dict[int, int] = {}  # rows read so far, by depth

    def key(self, depth: int) -> int:
        return self._sample[depth][1]

    def depths(self, limit: int) -> Iterator[int]:
        """Indices into the sample: the deepest that an owner may hold, half of it, and so on. The
        first is approximate if more than ``limit`` owners may hold as much."""
        low, high = 0, min(1, len(self._sample))
        # The end of a prefix is evicted before its beginning, and most prompts are held by no
        # owner: so double the depth first, then bisect the last interval.
        while low < high and self.slots_at(high - 1):
            low, high = high, min(2 * high, len(self._sample))
        while low < high and self.slots_at(max(0, low - 1)).bit_count() > limit:
            middle = (low + high) // 2
            if self.slots_at(middle):
                low = middle + 1
            else:
                high = middle
        while low:
            yield low - 1
            low //= 2

    def slots_at(self, depth: int) -> int:
        """The slots that may hold the prompt to this depth, by all rows read so far: it is rare
        that all of them are false positives."""
        if depth not in self._rows:
            self._rows[depth] = self._table._row(self.key(depth))
        slots = self._slots
        for row_depth, row in self._rows.items():
            if row_depth <= depth:
                slots &= row
        return slots


class Column(Generic[Owner]):
    """The keys that one owner may hold."""

    def __init__(self, table: PrefixTable[Owner], slot: int, owner: Owner) -> None:
        self.owner = owner
        self._table = table
        self._slot = slot
        self._part = table._parts[slot // (8 * WIDTH)]
        self._offset, self._bit = (slot >> 3) % WIDTH, 1 << (slot & 7)
        self._shape: tuple[int, int] | None = None
        self._stale = 0
        self._clean = True  # no bit of the column is set

    def shape(self, block_size: int, stride: int) -> None:
        """Set the block size and the stride of the keys; a block size of 0 stands for no keys."""
        shape = (block_size, stride) if block_size else None
        if shape == self._shape:
            return
        shapes, bit = self._table._shapes, 1 << self._slot
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
            self._part[(key >> SHIFT) * WIDTH + self._offset] |= self._bit

    def may_hold(self, key: int) -> bool:
        return bool(self._part[(key >> SHIFT) * WIDTH + self._offset] & self._bit)

    def outdated(self, count: int, keys: Callable[[], array[int]]) -> None:
        """Count bits whose keys were removed; ``keys()`` returns the remaining keys."""
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
        self._table._columns[self._slot] = None

    def _bytes(self) -> bytearray:
        """A copy of the bytes that hold this column's bits and those of seven others, one byte for
        each row."""
        return self._part[self._offset :: WIDTH]

    def _enter(self, keys: array[int], column: bytearray) -> None:
        bit = self._bit
        for row in memoryview(keys).cast("B").cast("H")[3::4]:
            column[row] |= bit
        self._part[self._offset :: WIDTH] = column


def _some(bits: int, turn: int, count: int) -> Iterator[int]:
    """At most ``count`` of the set bits, starting at a bit that depends on ``turn``."""
    start = turn * count % max(1, bits.bit_length())
    for part, base in ((bits >> start, start), (bits & (1 << start) - 1, 0)):
        while part and count:
            lowest = part & -part
            yield base + lowest.bit_length() - 1
            part ^= lowest
            count -= 1
