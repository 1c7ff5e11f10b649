"""The canary: one prompt that two nodes compute, and how far the results may differ.

A fingerprint covers shapes but not weights, and no hash detects two nodes that lay out the same
shape differently. So both nodes prefill this prompt once, and the decode node compares the KV that
it received over the real data plane with its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .cache_port import CachePort
from .messages import Compare

# With blocks of 16, the KV crosses a block boundary and ends within a block.
PROMPT_TOKENS = 31

# The tolerance for the first layer, relative to the layer's largest value. The effect of rounded
# weights on KV, by format and depth, is derived in docs/handoff.md; other roundings are measured.
# The limits lie above these differences, and below the differences that other weights make. Two
# correct results differ by rounding alone: in float32 by the order of summation, in other dtypes by
# the rounding of activations (2**-11 in float16, 2**-8 in bfloat16; the limit is 8 times that).
# Measured on random models of 24 layers: 4e-6 in float32, 4e-2 in bfloat16, both in the last layer.
# e4m3, for K and V but not for activations, rounds by 2**-4, and its errors average out: 7e-2 in
# the last layer, 0.4 with weights half as large again; the limit is three roundings. int8, with a
# scale for each vector, rounds by 2**-8 of the vector's largest value: 7e-2 in the last layer.
# Quantised weights differ from their originals by 1e-2 in the first layer and 0.12 in the last in
# Q8_0, by 3e-2 and 0.31 in Q6_K, by 0.17 and up to 1.25 in four bits. Other methods differ by half
# to three quarters of the limits of GGUF's formats with equally many bits; FP8, which rounds
# weights by 2**-4, differs like Q6_K. Three bits, and four bits with power-of-two scales, differ by
# 1.2 in the last layer, two bits by 1.55, so their first layers are decisive. Other weights or
# another layout differ by about 1.5. One bit, ternary digits, and two bits with one scale for 64
# values differ by 0.8 to 1.25 in the first layer, where other weights differ by 1.3 to 1.8, and by
# up to 2 in other layers.
_FIRST_LAYER = {
    "float32": 1e-4,
    "float16": 2.0**-8,
    "bfloat16": 2.0**-5,
    "int8": 2.0**-5,
    "Q8_0": 2.0**-4,
    "float8_e4m3fn": 3 * 2.0**-4,
    "Q6_K": 3 * 2.0**-4,
    "INT8": 2.0**-3,
    "INT6": 3 * 2.0**-4,
    "FP8": 3 * 2.0**-4,
    "Q4_1": 0.5,
    "Q4_0": 0.5,
    **dict.fromkeys(("Q3_K", "INT3", "MXFP4", "IQ3_XXS", "IQ3_S"), 0.75),
    **dict.fromkeys(("Q2_K", "INT2", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"), 1.0),
    **dict.fromkeys(("Q2_0", "Q1_0", "TQ1_0", "TQ2_0"), 1.25),
}
# Stands for formats of weights without an entry, which have four bits or more.
_OTHERS = "Q4_0"
# If two experts score almost equally, rounding can route a token to the other expert, after which
# its KV differs completely. So behind a router, only the best-agreeing tenth of the tokens is
# compared. Measured on random models of 24 layers with a router in each, in bfloat16: 0.6 of the
# limit, and ten times that for the worst token. With other weights, no token agrees.
_ROUTED_PART = 0.1
# The difference that another layout makes must exceed the limit at any depth; with fewer bits,
# at least in the first layers.
_MAX_TOLERANCE = 0.75
# The maximum for formats of four, three, two and fewer bits, by the limit of their first layer.
_MAX_OF_FEW_BITS = {0.5: 1.35, 0.75: 1.35, 1.0: 1.75, 1.25: 2.25}
# The lowest limit: an all-zero layer would have 0, by which ``ratio`` divides.
_SMALLEST = 1e-30


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference in one component of a layer (its K, its V, its latent). Both numbers
    are in units of the values."""

    layer: int
    component: str
    largest: float
    limit: float

    @property
    def ratio(self) -> float:
        """Above 1 if the difference is too large; infinite if a value is not finite."""
        ratio = self.largest / self.limit
        return ratio if math.isfinite(ratio) else math.inf


def canary_prompt(vocab_size: int, max_model_len: int) -> list[int]:
    """The prompt of every node: tokens from the whole vocabulary."""
    length = min(PROMPT_TOKENS, max_model_len - 1)
    return [(i * 2_654_435_761 + 12_345) % vocab_size for i in range(length)]


def tolerance(dtype: str, layer: int) -> float:
    """The limit for a layer. Rounding errors are independent, so differences grow with the square
    root of the depth."""
    first = _FIRST_LAYER[dtype]
    return min(first * math.sqrt(layer + 1), _MAX_OF_FEW_BITS.get(first, _MAX_TOLERANCE))


def coarsest(formats: Iterable[str]) -> str:
    """The format of weights and KV that rounds most. Unknown formats count as four bits."""
    limited = (name if name in _FIRST_LAYER else _OTHERS for name in formats)
    return max(limited, key=lambda name: _FIRST_LAYER[name])


def worst_difference(cache: CachePort, command: Compare) -> Difference:
    """Compare the same tokens in two block tables of one rank, and return the difference with the
    highest ratio."""
    differences = []
    for layer in range(len(cache.layout)):
        part = tolerance(command.rounding, layer)
        ours = _values(cache, layer, command.ours, command)
        theirs = _values(cache, layer, command.theirs, command)
        for name, mine in ours.items():
            largest = _largest(mine - theirs[name], layer < command.exact_layers)
            limit = max(part * float(np.abs(mine).max()), _SMALLEST)
            differences.append(Difference(layer, name, largest, limit))
    return max(differences, key=lambda difference: difference.ratio)


def _values(
    cache: CachePort, layer: int, table: Sequence[int], command: Compare
) -> dict[str, np.ndarray]:
    """Each component of some tokens of a layer as float32 [head, token, dim]."""
    first, end = command.first_token, command.end_token
    layout = cache.layout[layer].as_dtype("float32")
    buffer = memoryview(bytearray((end - first) * layout.token_bytes))
    layers = range(layer, layer + 1)
    cache.pack_frame(layers, table, first, end, buffer, dtype="float32").wait()
    values, heads = {}, len(layout.heads)
    for component in layout.components:
        size = heads * (end - first) * component.bytes
        shape = heads, end - first, component.dim
        values[component.name] = np.frombuffer(buffer[:size], np.float32).reshape(shape)
        buffer = buffer[size:]
    return values


def _largest(difference: np.ndarray, every_token: bool) -> float:
    """The largest of [head, token, dim], over all tokens or over the best-agreeing ones."""
    by_token = np.sort(np.abs(difference).max(axis=(0, 2)))
    if every_token or not np.isfinite(by_token[-1]):
        return float(by_token[-1])
    return float(by_token[int(len(by_token) * _ROUTED_PART)])
