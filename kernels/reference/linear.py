"""``x @ w.T + b`` with the weight packed once into the layout that this CPU multiplies fastest.

    x [rows, in]   w [out, in]   b [out]   ->   [rows, out], in x's dtype

On a GPU this is torch's own linear. On a CPU it depends on the weight's dtype:

- bf16 on a CPU that multiplies bf16, and fp32: oneDNN's blocked layout. Two Zen 4 cores in bf16: 25
  instead of 17 GB/s of weights at one row, 440 instead of 400 GFLOP/s at 512. Two Zen 3 cores in
  fp32: 22 instead of 13 GB/s at one row, 55 instead of 21 GFLOP/s at eight.
- bf16 on other CPUs, and fp16: FBGEMM's fp16 layout with fp32 sums. Two Zen 3 cores: 20 instead
  of torch's 11 GB/s at one row, 145 instead of 19 GFLOP/s at 32.

Small weights too, although calling these products takes longer than torch's own: MKL computes one
to three rows in another order than more, so a tie between two tokens would depend on the batch. A
row in oneDNN's layout had the same bits in any batch that was tried (Zen 3, fp32).

These ops come from inductor's freezing and dynamic quantisation, and are private to torch. So each
is tried on a small product first, and not used if it is missing or wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from ..signatures import Linear

Packer = Callable[[torch.Tensor, torch.Tensor | None], Linear]

# The number of rows that oneDNN's layout is optimised for; others work with the same packing.
_PACKED_FOR_ROWS = 32
# If its largest magnitude is in this range, a bf16 weight loses nothing that matters as fp16: below
# 2^-14 fp16 has steps of 2^-24, less than a thousandth of bf16's step at 2^-6.
_HALF_RANGE = (2.0**-6, 65504.0)
_UPCAST_BLOCK = 512


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Pack the weight for this device; only the packed copy is kept."""
    if weight.device.type != "cpu":
        return lambda x: F.linear(x, weight, bias)
    if multiplies(weight.dtype):
        return _blocked(weight, bias)
    if weight.dtype == torch.float32:
        return lambda x: F.linear(x, weight, bias)
    if works(_half, weight.dtype) and _fits_half(weight):
        return _half(weight, bias)
    return _upcast(weight, bias)


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations for weights of ``dtype``: float32 on a CPU that would convert them
    around every product and every norm anyway."""
    if device.type != "cpu" or multiplies(dtype):
        return dtype
    return torch.float32


def multiplies(dtype: torch.dtype) -> bool:
    """True if this CPU multiplies this dtype natively, in oneDNN's layout."""
    return dtype in (torch.bfloat16, torch.float32) and works(_blocked, dtype)


@cache
def works(packer: Packer, dtype: torch.dtype) -> bool:
    """True if the packed product exists in this torch and is correct on this CPU."""
    weight = torch.arange(64 * 32, dtype=torch.float32).view(64, 32).sin().to(dtype)
    bias = torch.arange(64, dtype=torch.float32).cos().to(dtype)
    rows = torch.arange(3 * 32, dtype=torch.float32).view(3, 32).cos().to(dtype)
    try:
        actual = packer(weight, bias)(rows)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(
        actual.float(), F.linear(rows.float(), weight.float(), bias.float()), atol=0.1
    )


def _blocked(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    with torch.no_grad():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    run = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: run(x, packed, bias, "none", [], "")


@dataclass(frozen=True, slots=True)
class PackedHalf:
    """A weight that torch has packed in float16; it does not tell how many bytes that takes."""

    packed: torch.ScriptObject
    nbytes: int


def _half(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    wide_bias = None if bias is None else bias.float()
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), wide_bias)
    half = PackedHalf(packed, 2 * weight.numel())
    run = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: run(x.float(), half.packed).to(x.dtype)


def _fits_half(weight: torch.Tensor) -> bool:
    if weight.dtype == torch.float16:
        return True
    lowest, highest = _HALF_RANGE
    return lowest <= weight.abs().max().item() <= highest


def _upcast(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Convert the weight during the product, one block that fits the cache at a time: several times
    faster for many rows than torch's product in a dtype that the CPU does not multiply."""
    wide_bias = None if bias is None else bias.float()

    def run(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        out = x.new_empty(x.shape[0], weight.shape[0])
        for first in range(0, weight.shape[0], _UPCAST_BLOCK):
            rows = slice(first, first + _UPCAST_BLOCK)
            part_bias = None if wide_bias is None else wide_bias[rows]
            out[:, rows] = F.linear(wide, weight[rows].float(), part_bias)
        return out

    return run
