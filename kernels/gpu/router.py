"""Triton router: the logits of experts in fp32, from activations and weights of 16 bits.

    x [T, C], weight [E, C]   ->   parts of logits [S, T, E]

Products of two numbers of 16 bits are exact in fp32, and so are summed as those of fp32 would be.
In steps of few rows a program takes some experts and inputs, so that many processors read the
weight; ``routing.py`` adds the parts of each sum. In others it takes all inputs.

T rows, C inputs, E experts, S parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..signatures import Routing
from .launch import cdiv, direct
from .routing import choose_experts

# In steps of up to FEW rows, inputs are divided among programs.
FEW = 512
_MAX_PARTS = 8
# Compile-time constants: for few rows, a program's inputs are one step if there are not many.
_FEW = {"ROWS": 16, "EXPERTS": 16, "STEP": 256, "num_warps": 4, "num_stages": 2}
_MANY = {"ROWS": 64, "EXPERTS": 64, "STEP": 64, "num_warps": 4, "num_stages": 3}
_ALIGNED = 16


def takes(x_TC: torch.Tensor) -> bool:
    """True if the kernel that is compiled for this width can read these activations."""
    whole = x_TC.shape[1] % _ALIGNED == 0 and x_TC.data_ptr() % 16 == 0
    return whole and x_TC.is_contiguous() and x_TC.dtype in (torch.float16, torch.bfloat16)


def route(
    x_TC: torch.Tensor, weight_EC: torch.Tensor, bias_E: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and indices of the experts of each row, both [T, K]."""
    return choose_experts(multiply_router(x_TC.contiguous(), weight_EC), routing, bias_E)


def multiply_router(x_TC: torch.Tensor, weight_EC: torch.Tensor) -> torch.Tensor:
    """The parts of the logits, whose sum is ``x @ weight.T``."""
    rows, inputs = x_TC.shape
    experts = len(weight_EC)
    assert takes(x_TC) and takes(weight_EC) and weight_EC.shape[1] == inputs
    assert x_TC.dtype == weight_EC.dtype, (x_TC.dtype, weight_EC.dtype)
    is_few = rows <= FEW
    fixed = _FEW if is_few else _MANY
    steps = cdiv(inputs, fixed["STEP"])
    part = fixed["STEP"] * (cdiv(steps, _MAX_PARTS) if is_few else steps)
    parts = cdiv(inputs, part)
    logits_STE = torch.empty(parts, rows, experts, dtype=torch.float32, device=x_TC.device)
    grid = cdiv(experts, fixed["EXPERTS"]), cdiv(rows, fixed["ROWS"]), parts
    if rows:
        _route[grid](x_TC, weight_EC, logits_STE, rows, experts, INPUTS=inputs, PART=part, **fixed)
    return logits_STE


@direct
@triton.jit(do_not_specialize=["rows", "experts"])
def _route(
    x_TC: tl.tensor,
    weight_EC: tl.tensor,
    logits_STE: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    INPUTS: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Multiply some inputs of some rows with some experts' weights."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)[None, :]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    part = tl.program_id(2)
    column = part * PART + tl.arange(0, STEP)
    x_at = x_TC + row.to(tl.int64) * INPUTS + column[None, :]
    weight_at = weight_EC + expert * INPUTS + column[:, None]
    acc = tl.zeros((ROWS, EXPERTS), tl.float32)
    for at in range(0, PART, STEP):
        inside = column < INPUTS - at
        x = tl.load(x_at + at, mask=(row < rows) & inside[None, :], other=0.0)
        weight = tl.load(weight_at + at, mask=(expert < experts) & inside[:, None], other=0.0)
        acc = tl.dot(x, weight, acc)
    out_at = (part * rows.to(tl.int64) + row) * experts + expert
    tl.store(logits_STE + out_at, acc, mask=(row < rows) & (expert < experts))
