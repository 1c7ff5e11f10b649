"""Reads of tensors from files, into existing memory.

Files are not mapped: truncation of a mapped file kills the process that reads it, and mapped pages
count as the process's memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelError

if TYPE_CHECKING:
    import torch

# Bytes that a thread reads at a time. Threads take turns in the order of the file, since Linux
# reads ahead of one place in it.
_PIECE = 1 << 20
# Bytes after the place of a read that are brought into the page cache: the disk has work while a
# large tensor is packed, and they stay cached until they are read.
_AHEAD = 256 << 20
# The number of the system call, on all of Linux's machines.
_CACHESTAT = 451


class FileReads:
    """Open files. Use as a context manager.

    With ``ahead``, files are read from the disk while tensors are packed. That is for files that
    are needed as a whole.
    """

    def __init__(self, *, ahead: bool = False) -> None:
        self._open: dict[Path, int] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._ahead = _ReadAhead() if ahead else None

    def __enter__(self) -> FileReads:
        self._open = {}
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ahead is not None:
            self._ahead.stop()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)  # of a tensor that has failed
            self._threads = None
        for file in (self._open or {}).values():
            os.close(file)
        self._open = None

    def rows(self, file: Path, begin: int, into: torch.Tensor, what: str) -> None:
        """Fill a contiguous tensor with the bytes of a file from ``begin`` on, by as many threads
        as torch uses. Raises ``ModelError``, which names ``what``, if the file is too short or
        unreadable."""
        import torch

        fd, data = self._descriptor(file, begin), into.view(-1).view(torch.uint8).numpy().data
        if len(data) < 2 * _PIECE or torch.get_num_threads() == 1:
            _fill(fd, begin, data, file, what)
            return
        self._threads = self._threads or ThreadPoolExecutor(torch.get_num_threads())
        pieces = [
            self._threads.submit(_fill, fd, begin + first, data[first : first + _PIECE], file, what)
            for first in range(0, len(data), _PIECE)
        ]
        for piece in pieces:
            piece.result()

    def columns(
        self, file: Path, begin: int, row_bytes: int, first: int, into: torch.Tensor, what: str
    ) -> None:
        """Fill a contiguous matrix with the bytes from ``first`` on of rows of ``row_bytes``.
        Nothing else is read."""
        import torch

        fd, begin = self._descriptor(file, begin), begin + first
        for row in into.view(torch.uint8).numpy():
            _fill(fd, begin, row.data, file, what)
            begin += row_bytes

    def bytes_at(self, file: Path, begin: int, count: int, what: str) -> bytearray:
        """Read ``count`` bytes, without torch."""
        data = bytearray(count)
        _fill(self._descriptor(file, begin), begin, memoryview(data), file, what)
        return data

    def _descriptor(self, file: Path, begin: int) -> int:
        """The descriptor of a file that is read from ``begin`` on."""
        assert self._open is not None, "the source is not open"
        if file not in self._open:
            try:
                self._open[file] = _open(file)
            except OSError as error:
                raise _unreadable(file, error) from error
        if self._ahead is not None:
            self._ahead.follow(file, begin)
        return self._open[file]


class _ReadAhead:
    """A thread that brings a file into the page cache from a place on. Its errors are left to the
    reads that follow.

    It reads into the same memory again and again. That takes less time than the page faults of a
    mapping, and Linux cuts ``readahead`` to a few megabytes.
    """

    def __init__(self) -> None:
        self._place: tuple[Path, int] | None = None
        self._thread: ThreadPoolExecutor | None = None
        # Descriptors of its own, for which Linux reads ahead of this thread only, and the pieces
        # that it has read.
        self._files: dict[Path, tuple[int, bytearray]] = {}

    def follow(self, file: Path, begin: int) -> None:
        """Continue from another place. Small steps are ignored."""
        last_file, last = self._place or (None, 0)
        if file == last_file and 0 <= begin - last < _PIECE:
            return
        self._place = file, begin
        self._thread = self._thread or ThreadPoolExecutor(1, "read-ahead")
        self._thread.submit(self._read, self._place)

    def stop(self) -> None:
        self._place = None
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
        for fd, _ in self._files.values():
            os.close(fd)
        self._files.clear()

    def _read(self, place: tuple[Path, int]) -> None:
        """Read unless there is another place by now."""
        file, begin = place
        if file not in self._files:
            fd = _open(file)
            self._files[file] = fd, bytearray(-(-os.fstat(fd).st_size // _PIECE))
        fd, done = self._files[file]
        end = min(-(-(begin + _AHEAD) // _PIECE), len(done))
        first = done.find(0, begin // _PIECE, end)
        if first < 0 or _is_cached(fd, first * _PIECE, end * _PIECE):
            return
        data = bytearray(_PIECE)
        while self._place is place and (number := done.find(0, first, end)) >= 0:
            done[number] = True
            os.preadv(fd, [data], number * _PIECE)


def _is_cached(fd: int, begin: int, end: int) -> bool:
    """True if a part of a file is known to be in the page cache: Linux 6.5 tells its owner."""
    if sys.platform != "linux":
        return False
    size = min(end, os.fstat(fd).st_size) - begin
    span, pages = (ctypes.c_uint64 * 2)(begin, size), (ctypes.c_uint64 * 5)()
    ctypes.CDLL(None).syscall(_CACHESTAT, fd, span, pages, 0)
    return pages[0] * mmap.PAGESIZE >= size


def _open(file: Path) -> int:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    if sys.platform == "linux":  # it reads twice as far ahead
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return fd


def _fill(fd: int, begin: int, data: memoryview, file: Path, what: str) -> None:
    try:
        while data:
            count = os.preadv(fd, [data], begin)
            if not count:
                raise ModelError(f"{file} was truncated while {what} was read: download it again")
            data, begin = data[count:], begin + count
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> ModelError:
    return ModelError(f"{file} cannot be read: {error.strerror}")
