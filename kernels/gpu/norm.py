"""Triton RMS norm, with or without an addition before it, in one launch.

    x [T, C], residual [T, C]   ->   normed [T, C], sum [T, C]

A program reads a row once and keeps it in registers. The sum is rounded to the dtype of the
activations before it is normalised, as torch's addition is; all else is fp32. Strides of rows are
counted in vectors, so that Triton compiles one kernel for all strides and knows their alignment.

T rows, C width.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl

from .launch import direct, next_power_of_2

# Bytes that a thread reads at a time.
VECTOR_BYTES = 16
# The widest row that fits the registers of a program.
MAX_WIDTH = 16384
_MAX_WARPS = 16
# Numbers of a thread, up to MAX_WARPS: a vector of two bytes each.
_VALUES = 8


def takes(x_TC: torch.Tensor) -> bool:
    """True if the kernel that is compiled for this width and dtype can read these rows."""
    if x_TC.dim() != 2 or x_TC.data_ptr() % VECTOR_BYTES:
        return False
    if x_TC.is_contiguous():
        return True
    vector, _ = _constants(x_TC.shape[1], x_TC.dtype)
    return x_TC.stride(1) == 1 and x_TC.stride(0) % vector == 0


def rms_norm(x_TC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each row."""
    normed = x_TC.new_empty(*x_TC.shape)
    _launch(x_TC, x_TC, weight_C, normed, normed, eps, has_residual=False)
    return normed


def add_rms_norm(
    x_TC: torch.Tensor, residual_TC: torch.Tensor, weight_C: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum of both, and the sum."""
    normed, total = x_TC.new_empty(*x_TC.shape), x_TC.new_empty(*x_TC.shape)
    _launch(x_TC, residual_TC, weight_C, normed, total, eps, has_residual=True)
    return normed, total


def _launch(
    x_TC: torch.Tensor,
    residual_TC: torch.Tensor,
    weight_C: torch.Tensor,
    normed_TC: torch.Tensor,
    sum_TC: torch.Tensor,
    eps: float,
    *,
    has_residual: bool,
) -> None:
    """For rows that the kernel ``takes``."""
    rows, width = x_TC.shape
    assert residual_TC.shape == x_TC.shape and width <= MAX_WIDTH
    assert weight_C.shape == (width,) and weight_C.is_contiguous()
    assert x_TC.dtype == residual_TC.dtype == weight_C.dtype
    if not rows:
        return
    vector, constants = _constants(width, x_TC.dtype)
    _rms_norm[(rows,)](
        x_TC,
        residual_TC,
        weight_C,
        normed_TC,
        sum_TC,
        x_TC.stride(0) // vector,
        residual_TC.stride(0) // vector,
        eps,
        HAS_RESIDUAL=has_residual,
        **constants,
    )


@cache
def _constants(width: int, dtype: torch.dtype) -> tuple[int, dict[str, int]]:
    """Numbers of a vector, the most of 16 bytes of which a row has a whole number; and the kernel's
    constants."""
    vector, block = math.gcd(width, VECTOR_BYTES // dtype.itemsize), next_power_of_2(width)
    warps = max(1, min(_MAX_WARPS, block // (32 * _VALUES)))
    return vector, {"WIDTH": width, "BLOCK": block, "VECTOR": vector, "num_warps": warps}


@direct
@triton.jit(do_not_specialize=["x_row", "residual_row"])
def _rms_norm(
    x_TC: tl.tensor,
    residual_TC: tl.tensor,
    weight_C: tl.tensor,
    normed_TC: tl.tensor,
    sum_TC: tl.tensor,
    x_row: tl.tensor,
    residual_row: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """Normalise a row, or its sum with another."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < WIDTH
    x = tl.load(x_TC + row * x_row * VECTOR + offs, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual_TC + row * residual_row * VECTOR + offs, mask=mask, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(sum_TC + row * WIDTH + offs, x, mask=mask)
    weight = tl.load(weight_C + offs, mask=mask, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    rstd = tl.math.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    normed = (wide * rstd * weight).to(normed_TC.dtype.element_ty)
    tl.store(normed_TC + row * WIDTH + offs, normed, mask=mask)
