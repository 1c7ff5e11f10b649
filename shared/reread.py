"""Values that come from files, and are read again when the files change."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from .errors import TandemError

log = logging.getLogger("tandem.files")

# How often the files are looked at, at most.
LOOK_SECONDS = 1.0

T = TypeVar("T")
_Look = tuple[tuple[int, int, int], ...]


class Reread(Generic[T]):
    """What ``read`` made of ``paths`` when they last changed. May be used by any thread.

    Files that ``read`` refuses with one of our errors, for instance a certificate whose key has not
    been written yet, change nothing: what was read before stays, the log says why, and the next
    change is another try. Raises what ``read`` raises when it is made.
    """

    def __init__(
        self,
        paths: Sequence[str],
        read: Callable[[], T],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._guard = threading.Lock()
        self._seen = self._look()
        self._looked_at = clock()
        self._value = read()
        self.generation = 0  # grows with each new value

    def value(self) -> T:
        if self._clock() - self._looked_at >= LOOK_SECONDS and self._guard.acquire(blocking=False):
            try:
                self._looked_at = self._clock()
                self._follow()
            finally:
                self._guard.release()
        return self._value

    def _follow(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        # Before the reading: a file that changes meanwhile is read once more.
        self._seen = seen
        names = ", ".join(self._paths)
        try:
            value = self._read()
        except TandemError as error:
            log.warning("%s changed and cannot be used, so nothing changes here: %s", names, error)
            return
        if value != self._value:
            self._value = value
            self.generation += 1
            log.info("%s changed, and are used from now on", names)

    def _look(self) -> _Look:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: str) -> tuple[int, int, int]:
    """Another one for another content, also where a link is turned to another file."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size
