"""Triton kernels for the experts of a mixture: products with plain weights, and the weighted sum of
experts' results. Products with quantised weights are in ``quantized_linear.py``.

T rows, K experts of each, S = T K rows of all experts in the experts' order, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, direct
from .row_blocks import RowBlocks

# By rows of a block: the outputs of a program, and the inputs of one of its steps.
ROWS = {8: (64, 128), 32: (64, 64), 64: (128, 64)}
_ALIGNED = 16
# Columns and choices that are added at a time.
_COLUMNS, _CHOICES = 512, 8
# Without the bound, ptxas saves registers, and reads fewer results at a time.
_ADD = {"num_warps": 2, "maxnreg": 96}


def multiply_experts(
    x_RI: torch.Tensor, weights_EOI: torch.Tensor, plan: RowBlocks
) -> torch.Tensor:
    """The products [S, O] of the plan's rows of x with their experts' weights, in x's dtype. Inputs
    are a multiple of 16, so that weights are read in whole words of 16 bytes."""
    _, outputs, inputs = weights_EOI.shape
    x_RI = x_RI.contiguous()
    out_SO = x_RI.new_empty(len(plan.sources), outputs)
    width, step = ROWS[plan.rows]
    _multiply_plain[(cdiv(outputs, width), len(plan.blocks))](
        x_RI,
        weights_EOI,
        plan.blocks,
        plan.sources,
        out_SO,
        outputs,
        inputs // _ALIGNED,
        ROWS=plan.rows,
        OUTPUTS=width,
        INPUTS=step,
        num_warps=4,
        num_stages=3,
    )
    return out_SO


def add_weighted(
    results_SC: torch.Tensor,
    weights_TK: torch.Tensor,
    plan: RowBlocks,
    out_TC: torch.Tensor | None,
) -> torch.Tensor:
    """Add the weighted results of each row's experts, in the order of ``weights``, to ``out`` if
    there is one. Returns the sums. Widths are a multiple of 16, as those of inputs are."""
    rows, top_k = weights_TK.shape
    width = results_SC.shape[1]
    assert width % _ALIGNED == 0, width
    sums_TC = results_SC.new_empty(rows, width) if out_TC is None else out_TC
    assert sums_TC.is_contiguous() and sums_TC.shape == (rows, width), sums_TC.shape
    _add_weighted[(rows, cdiv(width, _COLUMNS))](
        results_SC,
        weights_TK.contiguous(),
        plan.places,
        sums_TC,
        width // _ALIGNED,
        top_k,
        ADDS=out_TC is not None,
        CHOICES=_CHOICES,
        COLUMNS=_COLUMNS,
        **_ADD,
    )
    return sums_TC


@direct
@triton.jit(do_not_specialize=["outputs", "sixteenths"])
def _multiply_plain(
    x_RI: tl.tensor,
    weights_EOI: tl.tensor,
    blocks: tl.tensor,
    sources: tl.tensor,
    out_SO: tl.tensor,
    outputs: tl.tensor,
    sixteenths: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """Multiply a block of rows with some of an expert's outputs."""
    inputs = sixteenths * 16  # tells Triton that they are a multiple of 16
    block = blocks + 3 * tl.program_id(1)
    expert, first, count = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    source = tl.load(sources + first + row, mask=row < count, other=0).to(tl.int64)
    column = tl.arange(0, INPUTS)
    weight_at = (expert.to(tl.int64) * outputs + output) * inputs
    weight_at = weights_EOI + weight_at[:, None] + column[None, :]
    x_at = x_RI + (source * inputs)[None, :] + column[:, None]
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    # A block without rows reads nothing.
    for at in range(0, tl.where(count > 0, inputs, 0), INPUTS):
        inside = column < inputs - at
        weight = tl.load(
            weight_at + at, mask=(output < outputs)[:, None] & inside[None, :], other=0
        )
        x = tl.load(x_at + at, mask=inside[:, None] & (row < count)[None, :], other=0)
        acc = tl.dot(weight, x, acc)
    out_at = (first + row).to(tl.int64)[None, :] * outputs + output[:, None]
    out_mask = (output < outputs)[:, None] & (row < count)[None, :]
    tl.store(out_SO + out_at, acc.to(out_SO.dtype.element_ty), mask=out_mask)


@direct
@triton.jit(do_not_specialize=["sixteenths", "top_k"])
def _add_weighted(
    results_SC: tl.tensor,
    weights_TK: tl.tensor,
    places_TK: tl.tensor,
    sums_TC: tl.tensor,
    sixteenths: tl.tensor,
    top_k: tl.tensor,
    ADDS: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Add some columns of a row's results, and read several of them at a time."""
    row, width = tl.program_id(0).to(tl.int64), sixteenths * 16
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    sum_at = sums_TC + row * width + column
    acc = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, top_k, CHOICES):
        choice = first + tl.arange(0, CHOICES)[:, None]
        at, is_chosen = row * top_k + choice, choice < top_k
        place = tl.load(places_TK + at, mask=is_chosen, other=0)
        weight = tl.load(weights_TK + at, mask=is_chosen, other=0.0).to(tl.float32)
        result_at = results_SC + place * width + column[None, :]
        result = tl.load(result_at, mask=is_chosen & there[None, :], other=0.0)
        acc += tl.sum(weight * result.to(tl.float32), axis=0)
    if ADDS:
        acc += tl.load(sum_at, mask=there, other=0.0).to(tl.float32)
    tl.store(sum_at, acc.to(sums_TC.dtype.element_ty), mask=there)
