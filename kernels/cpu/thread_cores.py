"""A core for each thread of the kernels, where these have as many threads as there are cores.

The threads of a loop wait for each other, two hundred times in a step. Linux wakes a thread on the
core where it slept or on that of the thread that wakes it, unless another one is idle: beside any
other process two threads of a loop soon take turns on one core, and stay there, because they sleep
too much to be moved. Each loop then takes as long as a thread looks before it sleeps.
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
    """The cores that the calling thread may run on; none where a system does not bind threads."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def bind(cores: Sequence[int]) -> None:
    """Bind the calling thread, and the others that share its loops, to one of the cores each.

    There is a core for each thread. Threads that it starts later are bound to its own core.
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
