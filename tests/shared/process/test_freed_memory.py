"""Freed memory stays with the process."""

from __future__ import annotations

import ctypes
import resource
import sys

import pytest

from tandem.shared.process.freed_memory import keep_freed_memory

BUFFER_BYTES, BUFFERS = 1 << 20, 12
PAGES = BUFFERS * BUFFER_BYTES // resource.getpagesize()


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def fill_and_free(libc: ctypes.CDLL) -> None:
    buffers = [libc.malloc(ctypes.c_size_t(BUFFER_BYTES)) for _ in range(BUFFERS)]
    for buffer in buffers:
        ctypes.memset(buffer, 1, BUFFER_BYTES)
    for buffer in reversed(buffers):
        libc.free(ctypes.c_void_p(buffer))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_buffers_that_are_freed_together_are_not_faulted_in_again() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        pytest.skip("another C library")
    libc.malloc.restype = ctypes.c_void_p
    keep_freed_memory()
    fill_and_free(libc)
    before = faults()
    for _ in range(4):
        fill_and_free(libc)
    assert faults() - before < PAGES
