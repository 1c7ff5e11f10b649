"""Do two nodes compute the same KV? One prompt for both, and how far the results may differ.

A fingerprint covers shapes, not weights, and no hash shows two sides that lay out the same shape in
different ways. So both nodes prefill this prompt once, and the decode node compares the KV that
arrived over the real data plane with its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .cache_port import CachePort

# With blocks of 16, the KV crosses a border of blocks and ends within one.
PROMPT_TOKENS = 31

# How much a value of the first layer may differ, as a part of the largest one of its layer. Two
# right results differ by rounding alone: in float32 by the order of summation, in the others by
# every activation's rounding (2**-11 in float16, 2**-8 in bfloat16), of which this is 8 times.
# Measured on random models of 24 layers: 4e-6 in float32, 4e-2 in bfloat16, both in the last layer.
# Other weights or another layout differ by about 1.
_FIRST_LAYER = {"float32": 1e-4, "float16": 2.0**-8, "bfloat16": 2.0**-5}
# Never divide by what an all-zero layer would allow.
_SMALLEST = 1e-30


@dataclass(frozen=True, slots=True)
class Difference:
    """Where one layer's K or V differ most. Both numbers are in units of the values."""

    layer: int
    side: Literal["K", "V"]
    largest: float
    allowed: float

    @property
    def ratio(self) -> float:
        """Above 1 is too much, and so is a value that is no number."""
        ratio = self.largest / self.allowed
        return ratio if math.isfinite(ratio) else math.inf


def canary_prompt(vocab_size: int, max_model_len: int) -> list[int]:
    """The same on every node: tokens from all over the vocabulary."""
    length = min(PROMPT_TOKENS, max_model_len - 1)
    return [(i * 2_654_435_761 + 12_345) % vocab_size for i in range(length)]


def tolerance(dtype: str, layer: int) -> float:
    """Rounding errors are independent, so they add like the sides of a right angle with depth."""
    return _FIRST_LAYER[dtype] * math.sqrt(layer + 1)


def worst_difference(
    cache: CachePort,
    dtype: str,
    their_dtype: str,
    ours: Sequence[int],
    theirs: Sequence[int],
    first_token: int,
    end_token: int,
) -> Difference:
    """Compare the same tokens in two block tables of one rank; the difference with most excess.

    Both are in the cache's format ``dtype``; the second was computed in ``their_dtype``.
    """
    size = (end_token - first_token) * cache.layer_bytes_per_token
    buffers = memoryview(bytearray(size)), memoryview(bytearray(size))
    found = []
    for layer in range(cache.num_layers):
        for table, buffer in zip((ours, theirs), buffers, strict=True):
            cache.pack(layer, table, first_token, end_token, buffer)
        # The canonical layout has all of K before all of V.
        mine, other = (_values(buffer, dtype).reshape(2, -1) for buffer in buffers)
        part = max(tolerance(dtype, layer), tolerance(their_dtype, layer))
        found.append(_difference(layer, "K", mine[0], other[0], part))
        found.append(_difference(layer, "V", mine[1], other[1], part))
    return max(found, key=lambda difference: difference.ratio)


def _difference(
    layer: int, side: Literal["K", "V"], ours: np.ndarray, theirs: np.ndarray, part: float
) -> Difference:
    largest = float(np.abs(ours - theirs).max())
    return Difference(layer, side, largest, max(part * float(np.abs(ours).max()), _SMALLEST))


def _values(buffer: memoryview, dtype: str) -> np.ndarray:
    """The numbers in a buffer as float32."""
    if dtype == "bfloat16":  # which numpy does not know: the upper half of a float32
        return (np.frombuffer(buffer, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(buffer, np.dtype(dtype)).astype(np.float32)
