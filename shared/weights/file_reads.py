"""Reads of tensors from files, into existing memory.

Files are not mapped: truncation of a mapped file kills the process that reads it, and mapped pages
count as the process's memory.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelError

if TYPE_CHECKING:
    import torch

# Bytes that a thread reads at a time. Threads take turns in the order of the file, since Linux
# reads ahead of one place in it: also while weights are packed, which then delays a load less.
_PIECE = 1 << 20


class FileReads:
    """Open files. Use as a context manager."""

    def __init__(self) -> None:
        self._open: dict[Path, int] | None = None
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> FileReads:
        self._open = {}
        return self

    def __exit__(self, *exc: object) -> None:
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

        fd, data = self._descriptor(file), into.view(-1).view(torch.uint8).numpy().data
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

        fd, begin = self._descriptor(file), begin + first
        for row in into.view(torch.uint8).numpy():
            _fill(fd, begin, row.data, file, what)
            begin += row_bytes

    def bytes_at(self, file: Path, begin: int, count: int, what: str) -> bytearray:
        """Read ``count`` bytes, without torch."""
        data = bytearray(count)
        _fill(self._descriptor(file), begin, memoryview(data), file, what)
        return data

    def _descriptor(self, file: Path) -> int:
        assert self._open is not None, "the source is not open"
        if file not in self._open:
            try:
                self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise _unreadable(file, error) from error
            if sys.platform == "linux":  # it reads twice as far ahead
                os.posix_fadvise(self._open[file], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._open[file]


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
