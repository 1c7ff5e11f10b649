"""Reads of tensors from files, into existing memory.

Files are not mapped: truncation of a mapped file kills the process that reads it, and mapped pages
count as the process's memory.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelError

if TYPE_CHECKING:
    import torch

# Bytes per thread, at least.
_SHARE = 1 << 20
# Bytes that the kernel reads ahead, while weights are packed: packing then costs a load no time
# where the disk is slower, and reading none where it is faster.
_AHEAD = 256 << 20


@dataclass(slots=True)
class _ReadAhead:
    """The bytes of a file that were asked for since reads last jumped, how many of those passed
    were read, and whether too few were."""

    begin: int = 0
    end: int = 0
    read: int = 0
    useless: bool = False


class FileReads:
    """Open files. Use as a context manager."""

    def __init__(self) -> None:
        self._open: dict[Path, int] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: dict[int, _ReadAhead] = {}

    def __enter__(self) -> FileReads:
        self._open, self._ahead = {}, {}
        return self

    def __exit__(self, *exc: object) -> None:
        if self._threads is not None:
            self._threads.shutdown()
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
        self._ask_ahead(fd, begin, begin + len(data))
        count = min(torch.get_num_threads(), len(data) // _SHARE)
        if count < 2:
            _fill(fd, begin, data, file, what)
            return
        self._threads = self._threads or ThreadPoolExecutor(torch.get_num_threads())
        bounds = [len(data) * number // count for number in range(count + 1)]
        parts = [
            self._threads.submit(_fill, fd, begin + first, data[first:end], file, what)
            for first, end in pairwise(bounds)
        ]
        for part in parts:
            part.result()

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

    def _ask_ahead(self, fd: int, begin: int, end: int) -> None:
        """Have what follows these bytes read into the page cache, since tensors are mostly read in
        the order of the file. Not where large parts are left out, which other hosts read."""
        ahead = self._ahead.setdefault(fd, _ReadAhead())
        ahead.read += end - begin
        if not end <= ahead.end <= end + _AHEAD:
            ahead.begin, ahead.end, ahead.read = begin, end, end - begin
        is_partial = ahead.read < 0.75 * (end - ahead.begin)
        ahead.useless = ahead.useless or is_partial
        if end + _AHEAD - ahead.end < _AHEAD // 2 or ahead.useless or sys.platform != "linux":
            return
        os.posix_fadvise(fd, ahead.end, end + _AHEAD - ahead.end, os.POSIX_FADV_WILLNEED)
        ahead.end = end + _AHEAD

    def _descriptor(self, file: Path) -> int:
        assert self._open is not None, "the source is not open"
        if file not in self._open:
            try:
                self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise _unreadable(file, error) from error
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
