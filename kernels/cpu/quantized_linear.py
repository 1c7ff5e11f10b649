"""``x @ w.T`` with the weight in the blocks of its format, for CPUs that do not multiply bytes.

    x [rows, in] fp32   w [out, bytes of a row] uint8   ->   [rows, out] fp32

Few rows: each output's weights are decoded to a buffer in the L1 cache and multiplied there. Many
rows: some outputs at a time are decoded, and multiplied by torch.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numba import prange

from ..block_formats import Q4_0, Q4_1, Q6_K, Q8_0
from ..quantized import QuantizedWeight
from .jit import array, kernel
from .vector import LANES, decode_codes, widen

# Up to this many rows are multiplied output by output.
FEW = 16
# Outputs that a thread multiplies at once.
_STRIP = 16
# Weights that are decoded at a time for many rows: 4 MB.
_PIECE = 1 << 20

# The formats that are decoded here, with the kernels' numbers for them.
DECODED = {Q8_0: 0, Q4_0: 1, Q4_1: 2, Q6_K: 3}


class BlockLinear:
    """The product with a quantised weight in its original bytes."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._blocks = array(weight.blocks)
        self._bias = None if bias is None else bias.float()
        self._kind = DECODED[weight.format]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._multiply(x.float())
        return (out if self._bias is None else out.add_(self._bias)).to(x.dtype)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), len(self._blocks))
        if len(x) <= FEW:
            _multiply(self._kind, self._blocks, array(x), array(out))
            return out
        inputs = self._weight.inputs
        step = max(1, _PIECE // inputs)
        for first in range(0, len(self._blocks), step):
            part = self._blocks[first : first + step]
            weight = torch.empty(len(part), inputs)
            _decode_all(self._kind, part, array(weight))
            out[:, first : first + step] = F.linear(x, weight)
        return out

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """See ``QuantizedLinear``."""
        return self._weight.part(outputs).values()


@kernel(parallel=True)
def _multiply(kind: int, blocks: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    outputs, (rows, inputs) = blocks.shape[0], x.shape
    for strip in prange((outputs + _STRIP - 1) // _STRIP):
        weights = np.empty(inputs, np.float32)
        for output in range(strip * _STRIP, min(outputs, (strip + 1) * _STRIP)):
            _decode(kind, blocks[output], weights)
            for row in range(rows):
                total = np.float32(0)
                for index in range(inputs):
                    total += weights[index] * x[row, index]
                out[row, output] = total


@kernel(parallel=True)
def _decode_all(kind: int, blocks: np.ndarray, weights: np.ndarray) -> None:
    for output in prange(len(blocks)):
        _decode(kind, blocks[output], weights[output])


@kernel()
def _decode(kind: int, blocks: np.ndarray, weights: np.ndarray) -> None:
    if kind == 0:
        _decode_q8_0(blocks, weights)
    elif kind == 1:
        _decode_q4(blocks, weights, 18)
    elif kind == 2:
        _decode_q4(blocks, weights, 20)
    else:
        _decode_q6_k(blocks, weights)


@kernel()
def _half(blocks: np.ndarray, at: int) -> float:
    """The fp16 number at a byte."""
    return widen(np.int16(np.uint16(blocks[at]) | np.uint16(blocks[at + 1]) << np.uint16(8)))


@kernel()
def _store(
    weights: np.ndarray,
    to: int,
    blocks: np.ndarray,
    at: int,
    flip: int,
    shift: int,
    mask: int,
    scale: float,
    offset: float,
) -> None:
    factor, added = np.float32(scale), np.float32(offset)
    decode_codes(weights, to, blocks, at, flip, shift, mask, at, 0, 0, factor, added)


@kernel()
def _decode_q8_0(blocks: np.ndarray, weights: np.ndarray) -> None:
    for block in range(len(weights) // 32):
        scale = _half(blocks, block * 34)
        for part in range(0, 32, LANES):
            at = block * 34 + 2 + part
            # With the sign flipped, a code is unsigned and 128 too large.
            _store(weights, block * 32 + part, blocks, at, 128, 0, 255, scale, -128 * scale)


@kernel()
def _decode_q4(blocks: np.ndarray, weights: np.ndarray, nbytes: int) -> None:
    """Q4_0, or Q4_1 if blocks have a minimum."""
    for block in range(len(weights) // 32):
        begin = block * nbytes
        scale = _half(blocks, begin)
        offset = -8 * scale if nbytes == 18 else _half(blocks, begin + 2)
        for half in range(2):
            to = block * 32 + half * 16
            _store(weights, to, blocks, begin + nbytes - 16, 0, 4 * half, 15, scale, offset)


@kernel()
def _decode_q6_k(blocks: np.ndarray, weights: np.ndarray) -> None:
    for block in range(len(weights) // 256):
        begin = block * 210
        scale = _half(blocks, begin + 208)
        for group in range(16):
            # A half has four quarters with two groups each.
            half, quarter, part = group // 8, group // 2 % 4, group % 2 * 16
            low = begin + half * 64 + quarter % 2 * 32 + part
            high = begin + 128 + half * 32 + part
            factor = np.float32(scale * np.float32(np.int8(blocks[begin + 192 + group])))
            offset, to = np.float32(-32) * factor, block * 256 + group * 16
            lower, upper = quarter // 2 * 4, quarter * 2
            decode_codes(weights, to, blocks, low, 0, lower, 15, high, upper, 3, factor, offset)
