"""A set of 64-bit keys in eight bytes each, for a router that keeps millions of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

NO_KEYS: Keys = np.empty(0, dtype=np.uint64)
# Changes kept beside the sorted keys; more are merged into them, which takes about a millisecond
# for 16,384 keys.
MAX_CHANGES = 1024


class HeldKeys:
    """Sorted keys, and what has changed since they were sorted."""

    def __init__(self, keys: Keys = NO_KEYS) -> None:
        self._sorted = _sorted(keys)
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

    def all(self) -> Keys:
        """The keys, in order."""
        self._merge()
        return np.frombuffer(self._sorted, dtype=np.uint64)

    def update(self, added: Keys, removed: Keys) -> None:
        """A key in both is held afterwards."""
        self._changes.update(dict.fromkeys(removed.tolist(), False))
        self._changes.update(dict.fromkeys(added.tolist(), True))
        if len(self._changes) > MAX_CHANGES:
            self._merge()

    def _merge(self) -> None:
        if not self._changes:
            return
        changes, self._changes = self._changes, {}
        changed = np.fromiter(changes, dtype=np.uint64, count=len(changes))
        held = np.fromiter(changes.values(), dtype=bool, count=len(changes))
        before = np.frombuffer(self._sorted, dtype=np.uint64)
        kept = np.setdiff1d(before, changed, assume_unique=True)
        self._sorted = _sorted(np.concatenate([kept, changed[held]]))


def _sorted(keys: Keys) -> array[int]:
    """In an array of Python's own, in which one key is found faster than in numpy's."""
    # Not numpy's unique, which hashes first: nodes send their keys in order, which is soon sorted.
    ordered = np.sort(keys)
    first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    made = array("Q")
    made.frombytes(ordered[first].tobytes())
    return made
