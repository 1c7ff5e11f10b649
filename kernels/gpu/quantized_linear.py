"""Triton product of a few rows with a quantised weight, decoded in registers.

    x [R, I]   codes, scales, minimums, levels of ``GroupedCodes``   ->   out [R, O], in x's dtype

A program takes some outputs and all inputs, and multiplies all rows with each tile that it decodes.
Sums are fp32; products are taken in x's dtype.

R rows, I inputs, O outputs, S groups of neighbouring inputs that share a scale.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..fp8 import FP8
from ..grouped_codes import GroupedCodes

# Rows of the kernels that are compiled: a tensor core multiplies no fewer than the first number,
# and the sums of more than the last would not fit into registers. One for 32 would issue more
# instructions than that for 64, which Hopper multiplies out of shared memory.
ROWS = (16, 64)
# Outputs of a tile, and bytes of its codes by the size of x's numbers: float32 is multiplied
# without tensor cores, from registers.
_OUTPUTS = 32
_BYTES = {2: 64, 4: 32}
_ALIGNMENT = 16
# Options of compilation.
OPTIONS = {"num_warps": 4, "num_stages": 2}


def constants(weight: GroupedCodes, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time constants of ``_multiply``."""
    # A byte's two codes are in groups of their own, with as many registers of scales.
    many_scales = weight.halves and weight.scales.dtype == torch.float32
    return {
        "HALVES": weight.halves,
        "GROUP": weight.group,
        "ZERO": weight.zero,
        "HAS_MINIMUM": weight.minimums is not None,
        "HAS_LEVELS": weight.levels is not None,
        "FLOATS": weight.codes.dtype == FP8,
        "ROWS": next(most for most in ROWS if rows <= most),
        "OUTPUTS": _OUTPUTS,
        "BYTES": min(_BYTES[dtype.itemsize], 32 if many_scales else 64),
    }


def multiply(x_RI: torch.Tensor, weight: GroupedCodes) -> torch.Tensor:
    """Multiply at most ``ROWS[-1]`` rows."""
    rows, outputs = len(x_RI), weight.outputs
    assert rows > 0 and x_RI.shape[1] == weight.inputs
    x_RI = x_RI.contiguous()
    if x_RI.data_ptr() % _ALIGNMENT:  # a part of one row; Triton would compile another kernel
        x_RI = x_RI.clone()
    out_RO = x_RI.new_empty(rows, outputs)
    minimums = weight.scales if weight.minimums is None else weight.minimums
    levels = weight.table()
    _multiply[(triton.cdiv(outputs, _OUTPUTS),)](
        x_RI,
        weight.codes.view(torch.int8) if weight.codes.dtype == FP8 else weight.codes,
        weight.scales,
        minimums,
        weight.scales if levels is None else levels,
        out_RO,
        rows,
        outputs,
        weight.scales.shape[1],
        **constants(weight, rows, x_RI.dtype),
        **OPTIONS,
    )
    return out_RO


@triton.jit(do_not_specialize=["rows", "outputs", "groups"])
def _multiply(
    x_RI: tl.tensor,
    codes: tl.tensor,
    scales_OS: tl.tensor,
    minimums_OS: tl.tensor,
    levels: tl.tensor,
    out_RO: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    groups: tl.tensor,
    HALVES: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_LEVELS: tl.constexpr,
    FLOATS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BYTES: tl.constexpr,
) -> None:
    """Multiply all rows with some outputs."""
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = output < outputs
    # Bytes of a group of codes, and of a row of them.
    group_bytes: tl.constexpr = GROUP // 2 if HALVES else GROUP
    width = groups * group_bytes
    inputs = groups * GROUP
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, width, BYTES):
        at = first + tl.arange(0, BYTES)
        inside = there[:, None] & (at < width)[None, :]
        place = output[:, None].to(tl.int64) * width + at[None, :]
        code = tl.load(codes + place, mask=inside, other=0)
        group = at // group_bytes
        scale_at = output[:, None].to(tl.int64) * groups + group[None, :]
        scale = tl.load(scales_OS + scale_at, mask=inside, other=0).to(tl.float32)
        least = tl.zeros((OUTPUTS, BYTES), tl.float32)
        if HAS_MINIMUM:
            least = tl.load(minimums_OS + scale_at, mask=inside, other=0).to(tl.float32)
        column = group * GROUP + at % group_bytes if HALVES else at
        for half in tl.static_range(2 if HALVES else 1):
            number = code
            if HALVES:
                number = (code >> (4 * half)) & 15
            if HAS_LEVELS:
                number = tl.load(levels + number)
            if FLOATS:
                # e4m3, 20 bits further down than in a float32, whose exponent is 120 larger.
                bits = (number.to(tl.int32) << 20) & -2013265921
                number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
            weight = scale * (number.to(tl.float32) - ZERO) + least
            here = column + half * group_bytes
            taken = (row < rows)[:, None] & (at < width)[None, :]
            x = tl.load(x_RI + row[:, None] * inputs + here[None, :], mask=taken, other=0)
            total = tl.dot(x, tl.trans(weight.to(x.dtype)), total, input_precision="ieee")
    written = (row < rows)[:, None] & there[None, :]
    place = row[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(out_RO + place, total.to(out_RO.dtype.element_ty), mask=written)
