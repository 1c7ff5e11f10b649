"""The canary: one prompt that two nodes compute, and how far the results may differ.

A fingerprint covers shapes, not weights, and no hash reveals two sides that lay out the same shape
in different ways. So both nodes prefill this prompt once, and the decode node compares the KV that
arrived over the real data plane with its own.
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

# How much a value of the first layer may differ, relative to the largest one of its layer. What
# rounded weights do to KV, by their format and the depth, is derived in docs/handoff.md; that of
# other roundings is measured. The limits are chosen: above these differences, and below those that
# other weights make.
# Two correct results differ by rounding alone: in float32 by the order of summation, in the others
# by that of each activation (2**-11 in float16, 2**-8 in bfloat16), of which this is 8 times.
# Measured on random models of 24 layers: 4e-6 in float32, 4e-2 in bfloat16, both in the last layer.
# e4m3, which holds K and V but no activation, rounds by 2**-4, and its errors average out: 7e-2 in
# the last layer, 0.4 where the weights are half as large again; this is three roundings. int8, with
# a scale for each vector, rounds by 2**-8 of its largest value: 7e-2 in the last layer.
# Quantised weights beside those that they were made of differ by 1e-2 in the first layer and 0.12
# in the last in Q8_0, by 3e-2 and 0.31 in Q6_K, by 0.17 and 0.9 in four bits.
# Those of other methods differ by half to three quarters of the limits of GGUF's formats with as
# many bits; FP8, which rounds weights by 2**-4, differs as Q6_K. Three bits, and four whose
# scales are powers of two, differ by 1.2 in the last layer, two by 1.55, so that their first layers
# judge. Other weights or another layout differ by about 1.5.
# One bit, ternary digits, and two bits with one scale for 64 of them differ by 0.8 to 1.25 in the
# first layer, where other weights differ by 1.3 to 1.8, and by up to 2 in the others.
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
# Formats of weights without a limit of their own have four bits or more.
_OTHERS = "Q4_0"
# If two experts score almost equally, rounding alone can send a token to the other one, after which
# its KV differs completely. So behind a router, only the best-agreeing tenth of the tokens is
# compared. Measured on random models of 24 layers with a router in each, in bfloat16: 0.6 of the
# limit, while the worst token has ten times that. With other weights, no token agrees.
_ROUTED_PART = 0.1
# In models of any depth, the difference that another layout makes must stay above the limit.
_MOST = 0.75
# By the limit of the first layer: in four bits, three, two, and fewer.
_MAX_OF_FEW_BITS = {0.5: 1.1, 0.75: 1.35, 1.0: 1.75, 1.25: 2.25}
# Never divide by zero, the limit of an all-zero layer.
_SMALLEST = 1e-30


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference in one component of a layer (its K, its V, its latent). Both numbers
    are in units of the values."""

    layer: int
    component: str
    largest: float
    allowed: float

    @property
    def ratio(self) -> float:
        """Too much if above 1; infinite if a value is not finite."""
        ratio = self.largest / self.allowed
        return ratio if math.isfinite(ratio) else math.inf


def canary_prompt(vocab_size: int, max_model_len: int) -> list[int]:
    """The prompt of every node: tokens from the whole vocabulary."""
    length = min(PROMPT_TOKENS, max_model_len - 1)
    return [(i * 2_654_435_761 + 12_345) % vocab_size for i in range(length)]


def tolerance(dtype: str, layer: int) -> float:
    """The limit for a layer. Rounding errors are independent, so that differences grow with the
    square root of the depth."""
    first = _FIRST_LAYER[dtype]
    return min(first * math.sqrt(layer + 1), _MAX_OF_FEW_BITS.get(first, _MOST))


def coarsest(formats: Iterable[str]) -> str:
    """The format of weights and KV that rounds most; an unknown one is taken for one of 4 bits."""
    known = (name if name in _FIRST_LAYER else _OTHERS for name in formats)
    return max(known, key=lambda name: _FIRST_LAYER[name])


def worst_difference(cache: CachePort, command: Compare) -> Difference:
    """Compare the same tokens in two block tables of one rank, and return the difference with the
    highest ratio."""
    found = []
    for layer in range(len(cache.layout)):
        part = tolerance(command.rounding, layer)
        ours = _values(cache, layer, command.ours, command)
        theirs = _values(cache, layer, command.theirs, command)
        for name, mine in ours.items():
            largest = _largest(mine - theirs[name], layer < command.exact_layers)
            allowed = max(part * float(np.abs(mine).max()), _SMALLEST)
            found.append(Difference(layer, name, largest, allowed))
    return max(found, key=lambda difference: difference.ratio)


def _values(
    cache: CachePort, layer: int, table: Sequence[int], command: Compare
) -> dict[str, np.ndarray]:
    """Each component of some tokens of a layer as float32 [head, token, dim]."""
    first, end = command.first_token, command.end_token
    layout = cache.layout[layer].as_dtype("float32")
    buffer = memoryview(bytearray((end - first) * layout.token_bytes))
    cache.pack(layer, table, first, end, buffer, dtype="float32")
    values, heads = {}, len(layout.heads)
    for component in layout.components:
        size = heads * (end - first) * component.bytes
        shape = heads, end - first, component.dim
        values[component.name] = np.frombuffer(buffer[:size], np.float32).reshape(shape)
        buffer = buffer[size:]
    return values


def _largest(difference: np.ndarray, every_token: bool) -> float:
    """The largest of [head, token, dim], over all tokens or over those that agree best."""
    by_token = np.sort(np.abs(difference).max(axis=(0, 2)))
    if every_token or not np.isfinite(by_token[-1]):
        return float(by_token[-1])
    return float(by_token[int(len(by_token) * _ROUTED_PART)])
