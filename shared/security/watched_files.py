"""Values read from files, again whenever the files change."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ..errors import TandemError

log = logging.getLogger("tandem.files")

# Minimum time between checks of the files.
CHECK_SECONDS = 1.0

T = TypeVar("T")
_Stamps = tuple[tuple[int, int, int], ...]


class WatchedFiles(Generic[T]):
    """The value that ``read`` returned when ``paths`` last changed. Thread-safe.

    If ``read`` raises a ``TandemError``, for instance because a certificate has changed but its key
    has not yet, the old value stays until the next change, and the reason is logged. The
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
        self._stamps = self._read_stamps()
        self._checked_at = clock()
        self._value = read()
        self.generation = 0  # incremented with each new value

    def value(self) -> T:
        is_due = self._clock() - self._checked_at >= CHECK_SECONDS
        if is_due and self._guard.acquire(blocking=False):
            try:
                self._checked_at = self._clock()
                self._check()
            finally:
                self._guard.release()
        return self._value

    def _check(self) -> None:
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return
        # Set before reading, so that a change during the read is noticed.
        self._stamps = stamps
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

    def _read_stamps(self) -> _Stamps:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: str) -> tuple[int, int, int]:
    """A value that changes with the content, also if a symbolic link points to another file."""
    try:
        info = os.stat(path)
    except OSError:
        return 0, 0, 0
    return info.st_ino, info.st_mtime_ns, info.st_size
