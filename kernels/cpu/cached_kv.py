"""A component of a layer's cache for kernels: numbers, or 8-bit codes with scales.

Shapes as in ``operators.py``.
"""

from __future__ import annotations

import numpy as np
import torch

from ..scaled import LARGEST, SMALLEST, CachedKV, TensorScaledKV
from .jit import array, kernel
from .vector import narrow_scaled

# Codes [K, N, D], the scale of each head and token [K, N] or empty, and the scale of all codes.
CachedArrays = tuple[np.ndarray, np.ndarray, float]

_NO_SCALES = np.empty((0, 0), np.float32)
_LARGEST, _SMALLEST = np.float32(LARGEST), np.float32(SMALLEST)


def cached_arrays(cached: CachedKV) -> CachedArrays:
    """The memory of a component."""
    if isinstance(cached, torch.Tensor):
        return array(cached), _NO_SCALES, 1.0
    if isinstance(cached, TensorScaledKV):
        return array(cached.values), _NO_SCALES, cached.scale
    return array(cached.values), array(cached.scales[..., 0]), 1.0


def no_cached(dtype: np.dtype) -> CachedArrays:
    """A component of no tokens."""
    return np.empty((0, 0, 0), dtype), _NO_SCALES, 1.0


@kernel(exact=True)
def write_row(row: np.ndarray, cached: CachedArrays, head: int, slot: int) -> None:
    """Write a head's fp32 numbers of one token."""
    codes, scales, scale = cached
    into = codes[head, slot]
    if len(scales) == 0:
        for d in range(len(row)):
            into[d] = narrow_scaled(row[d], np.float32(scale), into[d])
        return
    # Compared as integers, so that a NaN is the largest.
    largest = np.int32(0)
    sizes = row.view(np.int32)
    for d in range(len(row)):
        largest = max(largest, sizes[d] & 0x7FFFFFFF)
    own = np.int32(largest).view(np.float32) / _LARGEST
    scales[head, slot] = own if not own < _SMALLEST else _SMALLEST
    for d in range(len(row)):
        into[d] = narrow_scaled(row[d], scales[head, slot], into[d])
