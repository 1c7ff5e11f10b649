"""A set of 64-bit keys in eight bytes each, for a router that keeps millions of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator

# Changes kept beside the sorted keys; more are merged into them, which takes about a millisecond
# for 16,384 keys.
MAX_CHANGES = 1024


class HeldKeys:
    """Sorted keys, and what has changed since they were sorted."""

    def __init__(self, keys: Iterable[int] = ()) -> None:
        self._sorted = array("Q", sorted(keys))
        self._changes: dict[int, bool] = {}  # True: added, False: removed

    def __len__(self) -> int:
        self._merge()
        return len(self._sorted)

    def __iter__(self) -> Iterator[int]:
        self._merge()
        return iter(self._sorted)

    def __contains__(self, key: int) -> bool:
        changed = self._changes.get(key)
        if changed is not None:
            return changed
        place = bisect_left(self._sorted, key)
        return place < len(self._sorted) and self._sorted[place] == key

    def update(self, added: Iterable[int], removed: Iterable[int]) -> None:
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
        kept += [key for key, held in changes.items() if held]
        kept.sort()
        self._sorted = array("Q", kept)
