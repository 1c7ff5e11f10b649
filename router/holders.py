"""Which of many nodes may hold a prefix, without asking each of them.

A table with a row for each of many groups of keys, and a bit for each node in a row: Bloom filters
side by side, so that one row says which nodes may hold a key. It may name a node that does not hold
it (12% for one key of a full set, far less for several), and never leaves one out. It takes 16 KiB
a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from .held_keys import NO_KEYS, Keys

ROW_BITS = 17
ROWS = 1 << ROW_BITS
SHIFT = 64 - ROW_BITS
# Bits cannot be cleared one by one; a column is written anew after so many removals.
MAX_STALE = 4096
# Nodes that are looked at closely at one depth of a prompt, besides those that are found.
MAX_LOOKS = 32

Owner = TypeVar("Owner")
Sample = list[tuple[int, int]]


class Holders(Generic[Owner]):
    """Owns the table. Each node has a column, by its slot."""

    def __init__(self) -> None:
        self._table = np.zeros((ROWS, 1), dtype=np.uint8)
        self._columns: list[Column[Owner] | None] = []
        self._shapes: dict[tuple[int, int], int] = {}

    def column(self, owner: Owner) -> Column[Owner]:
        """A new one, empty; its owner gives it back with ``release``."""
        slot = next((at for at, used in enumerate(self._columns) if used is None), None)
        if slot is None:
            slot = len(self._columns)
            self._columns.append(None)
            if slot >= 8 * self._table.shape[1]:
                self._table = np.hstack([self._table, np.zeros_like(self._table)])
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
        """Slots that may hold the prompt to this depth: three keys are seldom all wrong."""
        for place in {0, max(0, depth - 1), depth}:
            slots &= self._row(sample[place][1])
        return slots

    def _row(self, key: int) -> int:
        return int.from_bytes(self._table[key >> SHIFT].tobytes(), "little")


class Column(Generic[Owner]):
    """What one node may hold."""

    def __init__(self, holders: Holders[Owner], slot: int, owner: Owner) -> None:
        self.owner = owner
        self._holders = holders
        self._slot = slot
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

    def add(self, keys: Keys) -> None:
        if len(keys):
            self._bits()[_rows(keys)] |= self._bit
            self._clean = False

    def outdated(self, count: int, keys: Callable[[], Keys]) -> None:
        """So many bits stand for keys that are not held; ``keys()`` are those that are."""
        self._stale += count
        if self._stale > MAX_STALE:
            self.replace(keys())

    def replace(self, keys: Keys) -> None:
        if not self._clean:
            bits = self._bits()
            bits &= np.uint8(~self._bit & 0xFF)
        self._stale, self._clean = 0, True
        self.add(keys)

    def release(self) -> None:
        self.shape(0, 0)
        self.replace(NO_KEYS)
        self._holders._columns[self._slot] = None

    def _bits(self) -> NDArray[np.uint8]:
        """The bytes of the table that hold this column's bits, and those of seven others."""
        return self._holders._table[:, self._slot >> 3]

    @property
    def _bit(self) -> int:
        return 1 << (self._slot & 7)


def _rows(keys: Keys) -> NDArray[np.intp]:
    return (keys >> np.uint64(SHIFT)).astype(np.intp)


def _some(bits: int, turn: int, count: int) -> Iterator[int]:
    """At most ``count`` of the set bits, from a place on that ``turn`` shifts."""
    start = turn * count % max(1, bits.bit_length())
    for part, base in ((bits >> start, start), (bits & (1 << start) - 1, 0)):
        while part and count:
            lowest = part & -part
            yield base + lowest.bit_length() - 1
            part ^= lowest
            count -= 1
