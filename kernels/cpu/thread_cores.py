"""Binding of each kernel thread to a core, if there is a core for each.

The threads of a loop wait for each other two hundred times in a step. Linux wakes a thread on the
core where it slept or on the core of the waking thread, unless another core is idle. Beside any
other process, two threads of a loop soon share a core, and stay there, because they sleep too much
to be migrated. Each loop then takes as long as a thread polls before it sleeps.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import numpy as np
from numba import prange

from .byte_tile import call_address
from .jit import kernel


def usable_cores() -> list[int]:
    """The cores on which the calling thread may run; empty if the system cannot bind threads."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def bind(cores: Sequence[int]) -> None:
    """Bind the calling thread and the other threads of its loops to one core each.

    Threads that it starts later are bound to its own core.
    """
    bits = np.zeros((len(cores), (max(cores) // 64 + 1) * 64), np.uint8)
    bits[range(len(cores)), cores] = 1
    address = ctypes.cast(ctypes.CDLL(None).sched_setaffinity, ctypes.c_void_p).value
    assert address is not None
    _bind(address, np.packbits(bits, axis=1, bitorder="little"))


@kernel(parallel=True)
def _bind(set_affinity: int, masks: np.ndarray) -> None:
    """Each thread takes one mask."""
    for thread in prange(len(masks)):
        size = masks.shape[1]
        call_address(set_affinity, (0, size, masks.ctypes.data + thread * size))
