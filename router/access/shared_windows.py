"""Moving windows in a file that several processes map: the limits of a key hold for all of them.

Each window has a slot, found by the hash of its name. A lock on the file, which ends with a process
that dies, is held for microseconds at a time.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from .moving_windows import MINUTE, STEP_SECONDS, HalfSecond, Window

HASH_BYTES = 16
HEAD = struct.Struct("<16sdI")  # the name's hash, when it was used last, number of halves
HALF = struct.Struct("<dQ")
# A minute, the half second that runs, and one that has just ended.
MOST_HALVES = int(MINUTE / STEP_SECONDS) + 2
SLOT_BYTES = HEAD.size + MOST_HALVES * HALF.size
# Slots in which a window may be; the one used longest ago makes room.
PROBES = 8


class SharedWindows:
    """The windows in one file, which the first process makes. Their clock must be the same in all
    processes, as ``time.monotonic`` is."""

    def __init__(self, path: Path, slots: int, clock: Callable[[], float]) -> None:
        self._slots = slots
        self._clock = clock
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, slots * SLOT_BYTES)
        self._map = mmap.mmap(self._file, slots * SLOT_BYTES)

    @contextmanager
    def opened(self, key: str) -> Iterator[Window]:
        name = blake2b(key.encode(), digest_size=HASH_BYTES).digest()
        with self._locked():
            start = self._slot(name) * SLOT_BYTES
            window = self._read(start, name)
            window.slide(self._clock())
            try:
                yield window
            finally:
                self._write(start, name, window)

    def clear(self, key: str) -> None:
        with self.opened(key) as window:
            window.halves.clear()
            window.sum = 0

    def reset(self) -> int:
        with self._locked():
            self._map[:] = bytes(len(self._map))
        return self._slots

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _slot(self, name: bytes) -> int:
        """The slot of a window: its own, or the one to take."""
        first = int.from_bytes(name[:8], "little")
        near = [(first + probe) % self._slots for probe in range(PROBES)]
        heads = [HEAD.unpack_from(self._map, slot * SLOT_BYTES) for slot in near]
        for slot, (found, _, _) in zip(near, heads, strict=True):
            if found == name:
                return slot
        return min(zip(near, heads, strict=True), key=lambda pair: float(pair[1][1]))[0]

    def _read(self, start: int, name: bytes) -> Window:
        found, _, count = HEAD.unpack_from(self._map, start)
        if found != name:
            return Window()
        at = start + HEAD.size
        data = self._map[at : at + count * HALF.size]
        halves = deque(HalfSecond(begun, amount) for begun, amount in HALF.iter_unpack(data))
        return Window(halves, sum(half.sum for half in halves))

    def _write(self, start: int, name: bytes, window: Window) -> None:
        halves = list(window.halves)[-MOST_HALVES:]
        data = b"".join(HALF.pack(half.begun, half.sum) for half in halves)
        self._map[start : start + HEAD.size] = HEAD.pack(name, self._clock(), len(halves))
        at = start + HEAD.size
        self._map[at : at + len(data)] = data
