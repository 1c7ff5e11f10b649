"""A set of 64-bit keys in eight bytes each, for a router that keeps millions of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

# Changes kept beside the sorted keys; more are merged into them, which takes one or two
# milliseconds for 16,384 keys.
MAX_CHANGES = 1024


class KeySet:
    """Sorted keys, and what has changed since they were sorted."""

    def __init__(self, keys: Iterable[int] = ()) -> None:
        # Nodes send theirs in order, which is soon sorted.
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
        place = bisect_left(self._sorted, key)
        return place < len(self._sorted) and self._sorted[place] == key

    def all(self) -> array[int]:
        """The keys, in order; not to be changed."""
        self._merge()
        return self._sorted

    def update(self, added: Sequence[int], removed: Sequence[int]) -> None:
        """A key in both is held afterwards."""
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
