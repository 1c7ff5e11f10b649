"""Do two nodes compute the same KV? One prompt for both, and how far the results may differ.

A fingerprint covers shapes, not weights, and no hash shows two sides that lay out the same shape in
different ways. So both nodes prefill this prompt once, and the decode node compares the KV that
arrived over the real data plane with its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .cache_port import CachePort
from .formats import bytes_of

# With blocks of 16, the KV crosses a border of blocks and ends within one.
PROMPT_TOKENS = 31

# How much a value of the first layer may differ, as a part of the largest one of its layer. Two
# right results differ by rounding alone: in float32 by the order of summation, in the others by
# every activation's rounding (2**-11 in float16, 2**-8 in bfloat16), of which this is 8 times.
# Measured on random models of 24 layers: 4e-6 in float32, 4e-2 in bfloat16, both in the last layer.
# e4m3, which holds K and V but no activation, rounds by 2**-4, and its errors average out: 7e-2 in
# the last layer, 0.4 where the weights are half as large again; this is three roundings.
# Other weights or another layout differ by about 1.5.
_FIRST_LAYER = {
    "float32": 1e-4,
    "float16": 2.0**-8,
    "bfloat16": 2.0**-5,
    "float8_e4m3fn": 3 * 2.0**-4,
}
# However deep a model is, what another layout would give must stay too much.
_MOST = 0.75
# Never divide by what an all-zero layer would allow.
_SMALLEST = 1e-30


@dataclass(frozen=True, slots=True)
class Difference:
    """Where one side of a layer (its K, its V, its latent) differs most. Both numbers are in units
    of the values."""

    layer: int
    side: str
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
    return min(_FIRST_LAYER[dtype] * math.sqrt(layer + 1), _MOST)


def coarsest(formats: Iterable[str]) -> str:
    """Which of the formats that weights and KV are kept in rounds most. One that is not known here
    (of quantised weights) counts as the coarsest that is."""
    worst = max(_FIRST_LAYER, key=lambda name: _FIRST_LAYER[name])
    known = (name if name in _FIRST_LAYER else worst for name in formats)
    return max(known, key=lambda name: _FIRST_LAYER[name])


def worst_difference(
    cache: CachePort,
    dtype: str,
    rounding: str,
    ours: Sequence[int],
    theirs: Sequence[int],
    first_token: int,
    end_token: int,
) -> Difference:
    """Compare the same tokens in two block tables of one rank; the difference with most excess.

    Both are in the cache's format ``dtype``; ``rounding`` is the coarsest on the way to them.
    """
    size = (end_token - first_token) * cache.layer_bytes_per_token // bytes_of(dtype) * 4
    buffers = memoryview(bytearray(size)), memoryview(bytearray(size))
    found = []
    for layer in range(cache.num_layers):
        for table, buffer in zip((ours, theirs), buffers, strict=True):
            cache.pack(layer, table, first_token, end_token, buffer, dtype="float32")
        # The canonical layout has all of one side before all of the next.
        shape = len(cache.sides), -1
        mine, other = (np.frombuffer(buffer, np.float32).reshape(shape) for buffer in buffers)
        part = tolerance(rounding, layer)
        for side, one, another in zip(cache.sides, mine, other, strict=True):
            found.append(_difference(layer, side, one, another, part))
    return max(found, key=lambda difference: difference.ratio)


def _difference(
    layer: int, side: str, ours: np.ndarray, theirs: np.ndarray, part: float
) -> Difference:
    largest = float(np.abs(ours - theirs).max())
    return Difference(layer, side, largest, max(part * float(np.abs(ours).max()), _SMALLEST))
