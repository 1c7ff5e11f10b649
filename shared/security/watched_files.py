"""Values read from files, and read again when the files change."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ..errors import TandemError

log = logging.getLogger("tandem.files")

# The files are checked at most this often.
LOOK_SECONDS = 1.0

T = TypeVar("T")
_Look = tuple[tuple[int, int, int], ...]


class WatchedFiles(Generic[T]):
    """The value that ``read`` made of ``paths`` when they last changed. Thread-safe.

    If ``read`` raises a ``TandemError``, for instance because a certificate's key has not been
    written yet, the old value stays, the reason is logged, and the next change is tried again. The
    constructor raises whatever ``read`` raises.
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
        self.generation = 0  # incremented with each new value

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
        # Set before reading, so that a file that changes meanwhile is read again.
        self._seen = seen
        names = ", ".join(self._paths)
        try:
            value = self._read()
        except TandemError as error:
            log.warning(
                "%s changed but cannot be used, so the old content stays in use: %s", names, error
            )
            return
        if value != self._value:
            self._value = value
            self.generation += 1
            log.info("%s changed and are in use now", names)

    def _look(self) -> _Look:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: str) -> tuple[int, int, int]:
    """Differs when the content differs, also when a symbolic link points to another file."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size
