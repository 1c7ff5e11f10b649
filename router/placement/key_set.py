"""A set of 64-bit keys in eight bytes each, since a router holds millions of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

# Changes beside the sorted keys before they are merged, which takes one or two milliseconds for
# 16,384 keys.
MAX_CHANGES = 1024
# Three standard deviations of a key's index among 16,384 evenly distributed keys.
NEAR = 192


class KeySet:
    """Sorted keys, and the changes since they were sorted."""

    def __init__(self, keys: Iterable[int] = ()) -> None:
        # Nodes send their keys in order, which makes sorting fast.
        self._sorted: array[int] = array("Q", sorted(keys))
        self._changes: dict[int, bool] = {}  # True: added, False: removed

    def __len__(self) -> int:
        return len(self.all())

    def __iter__(self) -> Iterator[int]:
        return iter(self.all())

    def __contains__(self, key: int) -> bool:
        added = self._changes.get(key)
        if added is not None:
            return added
        keys = self._sorted
        count = len(keys)
        # Keys are hashes, so the index is near the key's share of the range. Searching all would
        # touch ten times as many pages, none of them in the processor's caches.
        guess = (key >> 48) * count >> 16
        low = guess - NEAR if guess > NEAR else 0
        high = guess + NEAR if guess + NEAR < count else count
        index = bisect_left(keys, key, low, high)
        if index in (low, high):
            index = bisect_left(keys, key)
        return index < count and keys[index] == key

    def all(self) -> array[int]:
        """The keys in order. Do not modify the result."""
        self._merge()
        return self._sorted

    def update(self, added: Sequence[int], removed: Sequence[int]) -> None:
        """Add and remove keys; a key in both is added."""
        self._changes.update(dict.fromkeys(removed, False))
        self._changes.update(dict.fromkeys(added, True))
        if len(self._changes) > MAX_CHANGES:
            self._merge()

    def _merge(self) -> None:
        if not self._changes:
            return
        changes, self._changes = self._changes, {}
        keys = [key for key in self._sorted if key not in changes]
        keys.extend(key for key, added in changes.items() if added)
        keys.sort()
        self._sorted = array("Q", keys)
