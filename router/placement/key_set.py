"""A set of 64-bit keys of eight bytes each, for a router that holds millions of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

# Changes held beside the sorted keys; more are merged into them, which takes one or two
# milliseconds for 16,384 keys.
MAX_CHANGES = 1024
# Three times the standard deviation of where a key is among 16,384 evenly distributed ones.
NEAR = 192


class KeySet:
    """Sorted keys, and the changes since they were sorted."""

    def __init__(self, keys: Iterable[int] = ()) -> None:
        # Nodes send theirs in order, which makes sorting fast.
        self._sorted: array[int] = array("Q", sorted(keys))
        self._changes: dict[int, bool] = {}  # True: added, False: removed

    def __len__(self) -> int:
        return len(self.all())

    def __iter__(self) -> Iterator[int]:
        return iter(self.all())

    def __contains__(self, key: int) -> bool:
        changed = self._changes.get(key)
        if changed is not None:
            return changed
        keys = self._sorted
        count = len(keys)
        # Keys are hashes, so this one is near its share of the way. A search of all would read
        # ten times as many pages of memory, none of which is in the processor's caches.
        guess = (key >> 48) * count >> 16
        low = guess - NEAR if guess > NEAR else 0
        high = guess + NEAR if guess + NEAR < count else count
        place = bisect_left(keys, key, low, high)
        if place in (low, high):
            place = bisect_left(keys, key)
        return place < count and keys[place] == key

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
        kept = [key for key in self._sorted if key not in changes]
        kept.extend(key for key, held in changes.items() if held)
        kept.sort()
        self._sorted = array("Q", kept)
