"""Triton gated activations in one launch.

    x [T, gate | up]   ->   activation(gate) * up [T, I]

Computed in fp32, and rounded to the dtype of the activations wherever torch's operators round.

T rows, I width of the feed-forward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..activations import CLAMPED_SWIGLU, Activation
from .launch import cdiv, direct, next_power_of_2

# Numbers of a program, and its warps: a thread reads a vector of each half.
_BLOCK = 1024
_OPTIONS = {"num_warps": 4}
_LIMIT = tl.constexpr(CLAMPED_SWIGLU["swiglu_limit"])
_ALPHA = tl.constexpr(CLAMPED_SWIGLU["swiglu_alpha"])
_INVERSE_ROOT_2 = tl.constexpr(0.5**0.5)
# Twice sqrt(2 / pi), and the cubic term of the approximation of gelu.
_TANH_SCALE = tl.constexpr(1.5957691216057308)
_TANH_CUBIC = tl.constexpr(0.044715)


def takes(x: torch.Tensor) -> bool:
    """True if the kernel that is compiled for this width and dtype can read this tensor."""
    return x.dim() == 2 and x.is_contiguous() and x.data_ptr() % 16 == 0


def act_and_mul(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``activation(gate) * up``."""
    assert takes(x) and x.shape[1] % 2 == 0, (x.shape, x.stride())
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    if out.numel():
        block = min(_BLOCK, next_power_of_2(width))
        _act_and_mul[(rows, cdiv(width, block))](
            x, out, WIDTH=width, BLOCK=block, ACTIVATION=activation, **_OPTIONS
        )
    return out


@direct
@triton.jit
def _act_and_mul(
    x: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    """Some columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + offs, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    if ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(-up > _LIMIT, 0.0 - _LIMIT, up))
        up = _rounded(up + 1, dtype)
        slope = _rounded(gate * _ALPHA, dtype)
        active = _rounded(gate * _rounded(1 / (1 + tl.exp(-slope)), dtype), dtype)
    else:
        active = _rounded(_activated(gate, ACTIVATION), dtype)
    tl.store(out + row * WIDTH + offs, (active * up).to(dtype), mask=mask)


@triton.jit
def _rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return x.to(dtype).to(tl.float32)


@triton.jit
def _activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "silu":
        out = x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y))
        doubled = (x + x * x * x * _TANH_CUBIC) * _TANH_SCALE
        out = x / (1 + tl.exp(-doubled))
    elif ACTIVATION == "gelu":
        out = 0.5 * x * (1 + tl.math.erf(x * _INVERSE_ROOT_2))
    else:
        tl.static_assert(ACTIVATION == "relu")
        out = tl.where(x < 0, 0.0, x)
    return out
