"""Memory that glibc keeps when it is freed, so that the next allocation does not fault it in again.

glibc returns freed memory to the kernel as soon as more than its trim threshold is free at the end
of a heap, and raises that threshold to twice the largest block only. Buffers of 1 MiB of which a
dozen are in use now and none a moment later, such as messages that ZeroMQ receives, are therefore
cleared by the kernel again and again, page by page.
"""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# As far as glibc would raise them by itself for a process with blocks of that size.
MMAP_THRESHOLD = 32 << 20
TRIM_THRESHOLD = 2 * MMAP_THRESHOLD


def keep_freed_memory() -> None:
    """Let this process keep up to ``TRIM_THRESHOLD`` bytes of freed memory in each heap. No-op
    with a C library other than glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in (
        (_M_MMAP_THRESHOLD, MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, TRIM_THRESHOLD),
    ):
        if not mallopt(parameter, value):
            log.debug("mallopt(%d, %d) is refused", parameter, value)
