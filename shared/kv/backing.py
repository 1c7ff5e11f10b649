"""Prefaulting of the cache's memory, so that no decode step has to wait for it.

On a CPU the cache's tensors are only address space at first: the kernel allocates and clears a page
on the first write. They are on huge pages, and each head of each layer has pages of its own, so the
first token after a page boundary costs hundreds of pages of 2 MiB at once: 0.2 to 1 s in which all
streams stall. A thread populates pages ahead of the blocks in use, which the pool allocates in
order.

The thread pauses between pages, so that concurrent steps keep their core. A low priority would be
worse: the thread holds the lock of the process's address space while the kernel clears a page, so
when other processes compete for the core, every thread would wait for the one that gets no time.
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
# Linux 5.14: populates pages without changing their contents.
_MADV_POPULATE_WRITE = 23
# The pause after populating a range, as a multiple of the time that took.
_REST = 3.0

Populate = Callable[[int, int], None]


class Backing:
    """Keeps a stretch of unused blocks populated, ahead of those in use.

    ``components`` are tensors of [heads, slots, dim], whose slots are blocks of ``block_size``.
    ``populate(address, bytes)`` allocates a range. If it raises ``OSError``, the thread ends, and
    memory is allocated on the first write.
    """

    def __init__(
        self,
        components: Iterable[torch.Tensor],
        block_size: int,
        populate: Populate | None = None,
    ) -> None:
        self._runs = [run for component in components for run in _runs(component, block_size)]
        self._populate = _populate_write if populate is None else populate
        self._blocks = max((run.blocks for run in self._runs), default=0)
        # A stretch is as many blocks as the smallest run has on one huge page.
        widths = [run.block_bytes for run in self._runs]
        self._stretch = -(-HUGE_PAGE // min(widths)) if widths else 1
        self._backed = 0
        self._target = 0
        self._changed = threading.Condition()

    def start(self) -> None:
        """Start the thread, which runs until the process ends."""
        threading.Thread(target=self._run, name="backing", daemon=True).start()

    def reach(self, block: int) -> None:
        """Note that blocks up to this one are, or will soon be, in use. Never blocks.

        The next stretch is requested when half of one is used, so that an idle node takes hardly
        more memory than it writes.
        """
        ahead = block + self._stretch // 2
        target = min(self._blocks, (ahead // self._stretch + 1) * self._stretch)
        if target > self._target:
            with self._changed:
                self._target = max(target, self._target)
                self._changed.notify()

    def reach_all(self, tables: Iterable[Sequence[int]]) -> None:
        """``reach`` the last block of each block table."""
        self.reach(max((table[-1] for table in tables if table), default=0))

    def back(self, rest: Callable[[float], None] = lambda seconds: None) -> None:
        """Populate all requested blocks, with a pause after each range. Raises ``OSError``."""
        while self._backed < self._target:
            end = min(self._target, self._backed + self._stretch)
            for run in self._runs:
                start = time.perf_counter()
                self._populate(*run.pages(self._backed, end))
                rest(_REST * (time.perf_counter() - start))
            self._backed = end

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._backed < self._target)
                self.back(time.sleep)
        except OSError as error:
            log.info("the KV cache is allocated on the first write: %s", error)


@dataclass(frozen=True, slots=True)
class _Run:
    """One head's slots, contiguous in memory."""

    address: int
    block_bytes: int
    blocks: int

    def pages(self, first: int, end: int) -> tuple[int, int]:
        """Address and size of the pages that hold blocks first to end."""
        begin = self.address + first * self.block_bytes
        begin -= begin % mmap.PAGESIZE
        stop = self.address + min(end, self.blocks) * self.block_bytes
        return begin, stop - begin


def _runs(component: torch.Tensor, block_size: int) -> Iterable[_Run]:
    heads, slots, dim = component.shape
    head_bytes = component.stride(0) * component.element_size()
    block_bytes = block_size * dim * component.element_size()
    for head in range(heads):
        yield _Run(component.data_ptr() + head * head_bytes, block_bytes, slots // block_size)


def _populate_write(address: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "madvise"):
        raise OSError(errno.ENOSYS, "this system has no madvise")
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
