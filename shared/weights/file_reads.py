"""Reads of tensors from files, into existing memory.

Files are not mapped: truncation of a mapped file kills the process that reads it, and mapped pages
count as the process's memory.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ModelError

if TYPE_CHECKING:
    import torch

# Bytes that a thread reads at a time. Threads take turns in the order of the file, since Linux
# reads ahead of one place in it.
_PIECE = 1 << 20
# Bytes that are brought into the page cache before they are read: the disk has work while a large
# tensor is packed, and they stay cached until they are read.
_AHEAD = 256 << 20
# Bytes of it that may be read in another order, and in one system call.
_NEAR, _AT_ONCE = 64 << 20, 8 << 20


class FilePart(NamedTuple):
    """Bytes of a file."""

    file: Path
    begin: int
    end: int


class FileReads:
    """Open files. Use as a context manager."""

    def __init__(self) -> None:
        self._open: dict[Path, int] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: _ReadAhead | None = None

    def __enter__(self) -> FileReads:
        self._open = {}
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)  # of a tensor that has failed
            self._threads = None
        for file in (self._open or {}).values():
            os.close(file)
        self._open = None

    def ahead(self, parts: Sequence[FilePart]) -> None:
        """Read parts of files from the disk while tensors are packed. Call once, with all parts in
        the order in which they will be read."""
        assert self._ahead is None
        if sys.platform == "linux":
            self._ahead = _ReadAhead(_by_place(parts))

    def note_read(self, nbytes: int) -> None:
        """Note that bytes of those parts are read now."""
        if self._ahead is not None:
            self._ahead.make_room(nbytes)

    def rows(self, file: Path, begin: int, into: torch.Tensor, what: str) -> None:
        """Fill a contiguous tensor with the bytes of a file from ``begin`` on, by as many threads
        as torch uses. Raises ``ModelError``, which names ``what``, if the file is too short or
        unreadable."""
        import torch

        fd, data = self._descriptor(file, into.nbytes), into.view(-1).view(torch.uint8).numpy().data
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

        fd, begin = self._descriptor(file, into.nbytes), begin + first
        for row in into.view(torch.uint8).numpy():
            _fill(fd, begin, row.data, file, what)
            begin += row_bytes

    def bytes_at(self, file: Path, begin: int, count: int, what: str) -> bytearray:
        """Read ``count`` bytes, without torch."""
        data = bytearray(count)
        _fill(self._descriptor(file, count), begin, memoryview(data), file, what)
        return data

    def _descriptor(self, file: Path, count: int) -> int:
        """The descriptor of a file, of which ``count`` bytes are read."""
        assert self._open is not None, "the source is not open"
        if file not in self._open:
            try:
                self._open[file] = _open(file)
            except OSError as error:
                raise _unreadable(file, error) from error
        self.note_read(count)
        return self._open[file]


class _ReadAhead:
    """A thread that brings parts of files into the page cache. Its errors are left to the reads
    that follow.

    It sends them nowhere, which moves pages without copying bytes, a fifth of the work of a read.
    Linux cuts ``readahead`` to a few megabytes, which it reads in small pages.
    """

    def __init__(self, parts: Sequence[FilePart]) -> None:
        self._parts = parts
        self._room = _AHEAD  # bytes that it may read before others have read more
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def make_room(self, count: int) -> None:
        """Note that others read some bytes now."""
        with self._changed:
            self._room += count
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        # Descriptors of its own, for which Linux reads ahead of this thread only.
        with ExitStack() as closing, suppress(OSError):
            nowhere = closing.enter_context(open(os.devnull, "wb")).fileno()
            files: dict[Path, int] = {}
            for file, begin, end in self._parts:
                if file not in files:
                    files[file] = _open(file)
                    closing.callback(os.close, files[file])
                while begin < end:
                    count = min(_AT_ONCE, end - begin)
                    if not self._may_read(count):
                        return
                    os.sendfile(nowhere, files[file], begin, count)
                    begin += count

    def _may_read(self, count: int) -> bool:
        """Wait for room; False if the reads are over."""
        with self._changed:
            while self._room < count and not self._stopped:
                self._changed.wait()
            self._room -= count
        return not self._stopped


def _by_place(parts: Sequence[FilePart]) -> list[FilePart]:
    """The parts in the order of their files where they are read soon after each other, and joined
    if they share a page."""
    ends = accumulate(part.end - part.begin for part in parts)
    joined: list[FilePart] = []
    for _, part in sorted((end // _NEAR, part) for end, part in zip(ends, parts, strict=True)):
        last = joined[-1] if joined else part
        if last.file == part.file and 0 <= part.begin - last.end < mmap.PAGESIZE:
            joined[-1] = last._replace(end=part.end)
        else:
            joined.append(part)
    return joined


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
