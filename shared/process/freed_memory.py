"""Thresholds below which glibc keeps freed memory, so that it need not be faulted in again.

glibc returns memory to the kernel as soon as more than its trim threshold is free at the end of a
heap, and raises that threshold only to twice the largest block. If a dozen buffers of 1 MiB are in
use now and none a moment later, as with messages that ZeroMQ receives, the kernel therefore clears
the same pages again and again.
"""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The values to which glibc itself would raise them for blocks of this size.
MMAP_THRESHOLD = 32 << 20
TRIM_THRESHOLD = 2 * MMAP_THRESHOLD


def keep_freed_memory() -> None:
    """Keep up to ``TRIM_THRESHOLD`` bytes of freed memory in each heap. No-op without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in (
        (_M_MMAP_THRESHOLD, MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, TRIM_THRESHOLD),
    ):
        if not mallopt(parameter, value):
            log.debug("mallopt(%d, %d) is refused", parameter, value)
