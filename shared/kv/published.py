"""Digest of a prefix index for routers: a bounded set of short keys, and its changes.

The set has every key of the index that ``stride`` divides. The keys are hashes, so this is an even
sample, and a router that computes the keys of a prompt knows which of them the digest could have.
``stride`` is 1 until the set is full; then it doubles and half of the set is dropped. It never
decreases: a pool that was that full once will be again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from .prefix_keys import short_key

# 128 KiB for a new router, at most 32 KiB for an update.
MAX_KEYS = 16384
MAX_CHANGES = 4096


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes from version ``base`` to ``version``; with base 0, ``added`` is the whole set."""

    version: int
    base: int
    stride: int
    added: list[int]
    removed: list[int]


class PrefixDigest:
    """The sample and its recent changes. Its first version is 1."""

    def __init__(self, max_keys: int = MAX_KEYS, max_changes: int = MAX_CHANGES) -> None:
        self.stride = 1
        self._max_keys = max_keys
        self._max_changes = max_changes
        self._keys: set[int] = set()
        self._version = 1
        self._changed: deque[int] = deque()  # the keys of the last changes, oldest first

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def add(self, key: bytes) -> None:
        short = short_key(key)
        if short % self.stride:
            return
        self._keys.add(short)
        self._note(short)
        while len(self._keys) > self._max_keys:
            self._thin_out()

    def remove(self, key: bytes) -> None:
        short = short_key(key)
        if short in self._keys:
            self._keys.remove(short)
            self._note(short)

    def since(self, version: int) -> Changes:
        """The changes after ``version``. Applying them twice, or to a version between the two,
        gives the same set."""
        missed = self._version - version
        if not 0 <= missed <= len(self._changed):
            # Sorted here, so that a router with many nodes need not.
            return Changes(self._version, 0, self.stride, sorted(self._keys), [])
        changed = set(islice(self._changed, len(self._changed) - missed, None))
        added = [key for key in changed if key in self._keys]
        removed = [key for key in changed if key not in self._keys]
        return Changes(self._version, version, self.stride, added, removed)

    def _note(self, short: int) -> None:
        self._version += 1
        self._changed.append(short)
        if len(self._changed) > self._max_changes:
            self._changed.popleft()

    def _thin_out(self) -> None:
        self.stride *= 2
        self._keys = {key for key in self._keys if not key % self.stride}
        self._version += 1
        self._changed.clear()
