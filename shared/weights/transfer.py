"""Downloads of weights: disk space and progress."""

from __future__ import annotations

import errno
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import ModelError

log = logging.getLogger("tandem.node")
# Interval of progress lines, where there are no progress bars.
_LINE_SECONDS = 10.0


def in_words(size: float) -> str:
    """A number of bytes in words, such as ``4.2 GB``."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


# A full disk or quota.
FULL = frozenset((errno.ENOSPC, errno.EDQUOT))

# Disk errors that come without a file name.
_DISK_ERRORS = frozenset((errno.EACCES, errno.EIO))


def disk_problem(error: OSError, cache: object, variable: str) -> str | None:
    """Describe a disk error in a hub's cache, which the environment variable ``variable`` moves;
    ``None`` for a network error."""
    if error.errno in FULL:
        return (
            f"the disk of the cache {cache} is full: free some space and run it again, which "
            f"resumes the download, or move the cache by {variable}"
        )
    if error.filename is None and error.errno not in _DISK_ERRORS:
        return None
    place = f"{error.filename}: " if error.filename else ""
    return f"the cache {cache} cannot be used ({place}{error.strerror}): {variable} moves it"


def check_space(name: str, needed: int, cache: Path, variable: str) -> None:
    """Raise ``ModelError`` if ``needed`` bytes do not fit; ``variable`` moves the cache."""
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ModelError(
            f"{name!r} needs {in_words(needed)}, and {in_words(free)} are free in {cache}: free "
            f"some, or move the cache by {variable}"
        )


@contextmanager
def report_progress(
    name: str, files: Sequence[str], size: int, cache: Path, done: Callable[[], int]
) -> Iterator[None]:
    """Log the progress of a download, unless there is a terminal for the client's progress bars.
    ``done`` returns the number of bytes downloaded."""
    if sys.stderr.isatty():
        yield
        return
    count = f"{len(files)} files" if len(files) > 1 else files[0]
    tell(f"downloading {count} of {name}{f', {in_words(size)},' if size else ''} to {cache}")
    start, end = time.monotonic(), threading.Event()

    def watch() -> None:
        while not end.wait(_LINE_SECONDS):
            of = f" of {in_words(size)}" if size else ""
            tell(f"downloading {name}: {in_words(done())}{of}")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        end.set()
        watcher.join()
    tell(f"downloaded {name} in {time.monotonic() - start:.0f} s")


@contextmanager
def silenced(*loggers: str) -> Iterator[None]:
    """Let these loggers log nothing meanwhile, for a client whose errors are reported otherwise."""
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def tell(line: str) -> None:
    """Log a line, or print it if logging is not configured."""
    if log.hasHandlers():
        log.info(line)
    else:
        print(f"tandem: {line}", file=sys.stderr)
