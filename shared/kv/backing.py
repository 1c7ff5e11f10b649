"""Memory for the cache before it is written, so that no decode step has to wait for it.

On a CPU the cache's tensors are address space at first: the kernel finds and clears a page when it
is first written. They lie on huge pages, and each head of each layer on pages of its own, so the
first token behind a boundary costs hundreds of pages of 2 MiB at once: 0.2 to 1 s in which no
stream goes on. A thread does that ahead of the blocks that are in use; the pool hands out blocks
that were never used in order.

The thread rests between two pages, so that the steps beside it keep their core. It must not have a
low priority instead: it holds the lock of the process's address space while a page is cleared, and
where other processes want the core, all threads would wait for the one that gets no time.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

log = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
# Linux 5.14: as if each page had been written, without changing what it holds.
_MADV_POPULATE_WRITE = 23
# As many times as long as a range has taken.
_REST = 3.0

Populate = Callable[[int, int], None]


class Backing:
    """Keeps a stretch of unused blocks in memory, ahead of those that are in use.

    ``sides`` are tensors of [heads, slots, dim], whose slots are blocks of ``block_size``.
    ``populate(address, bytes)`` gives a range its memory; it raises ``OSError`` where that is not
    possible, after which memory comes when it is written.
    """

    def __init__(
        self,
        sides: Iterable[torch.Tensor],
        block_size: int,
        populate: Populate | None = None,
    ) -> None:
        self._runs = [run for side in sides for run in _runs(side, block_size)]
        self._populate = _populate_write if populate is None else populate
        self._blocks = max((run.blocks for run in self._runs), default=0)
        # A stretch is as many blocks as the smallest run has on one huge page.
        widths = [run.block_bytes for run in self._runs]
        self._stretch = -(-HUGE_PAGE // min(widths)) if widths else 1
        self._backed = 0
        self._wanted = 0
        self._changed = threading.Condition()

    def start(self) -> None:
        """Work from now on, for as long as the process lives."""
        threading.Thread(target=self._run, name="backing", daemon=True).start()

    def reach(self, block: int) -> None:
        """Blocks up to this one are in use, or are about to be. Takes no time.

        The next stretch is wanted when half of one is used, so that a node that serves little
        takes no more memory than it writes.
        """
        ahead = block + self._stretch // 2
        wanted = min(self._blocks, (ahead // self._stretch + 1) * self._stretch)
        if wanted > self._wanted:
            with self._changed:
                self._wanted = max(wanted, self._wanted)
                self._changed.notify()

    def reach_all(self, tables: Iterable[Sequence[int]]) -> None:
        """Block tables of which the newest blocks come last."""
        self.reach(max((table[-1] for table in tables if table), default=0))

    def back(self, rest: Callable[[float], None] = lambda seconds: None) -> None:
        """Give memory to all blocks that are wanted and have none yet, with a rest after each
        range. Raises ``OSError``."""
        while self._backed < self._wanted:
            end = min(self._wanted, self._backed + self._stretch)
            for run in self._runs:
                begun = time.perf_counter()
                self._populate(*run.pages(self._backed, end))
                rest(_REST * (time.perf_counter() - begun))
            self._backed = end

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._backed < self._wanted)
                self.back(time.sleep)
        except OSError as error:
            log.info("the KV cache gets its memory when it is first written: %s", error)


@dataclass(frozen=True, slots=True)
class _Run:
    """One head's slots, which lie side by side in memory."""

    address: int
    block_bytes: int
    blocks: int

    def pages(self, first: int, end: int) -> tuple[int, int]:
        """Address and bytes of the whole pages that hold blocks first to end."""
        begin = self.address + first * self.block_bytes
        begin -= begin % mmap.PAGESIZE
        stop = self.address + min(end, self.blocks) * self.block_bytes
        return begin, stop - begin


def _runs(side: torch.Tensor, block_size: int) -> Iterable[_Run]:
    heads, slots, dim = side.shape
    head_bytes = side.stride(0) * side.element_size()
    block_bytes = block_size * dim * side.element_size()
    for head in range(heads):
        yield _Run(side.data_ptr() + head * head_bytes, block_bytes, slots // block_size)


def _populate_write(address: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "madvise"):
        raise OSError(errno.ENOSYS, "this system has no madvise")
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
