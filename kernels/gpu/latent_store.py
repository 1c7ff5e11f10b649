"""Triton norm of latents, rotation, and the write to the paged cache, in one launch.

    kv [T, C + R]   ->   latents [1, slots, C + R] at slots [T];   q [T, H, N + R] is rotated

A program takes the latent of a row, or some of its query heads. Numbers are rounded to the dtype of
the activations after the norm and the rotation, as torch's operators round them, and then to the
cache's; fp8 by integer instructions, which all GPUs have. A row with a negative slot is not cached.

T rows, H query heads, dimensions: N of a query without position, R of the rotated part, C of a
latent.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..fp8 import FP8
from ..scaled import INT8, LARGEST, SMALLEST, CachedKV
from ..signatures import CosSin
from .cached_kv import parts, to_fp8, to_int8, whole_scale
from .launch import cdiv, direct, next_power_of_2

VECTOR_BYTES = 16
# Numbers of each half of the queries that a program rotates, and its warps: a thread has a vector.
# Without the bound, ptxas saves registers, and reads the angles only when the queries are there.
_BLOCK = 512
_OPTIONS = {"num_warps": 2, "maxnreg": 96}
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST)


def takes(q_THD: torch.Tensor, kv_TC: torch.Tensor) -> bool:
    """True if the kernel that is compiled for these sizes can read queries and latents where they
    are: parts of one product's results, in whole vectors."""
    vector = _vector(q_THD, kv_TC)
    rows = (q_THD, q_THD.stride(0)), (kv_TC, kv_TC.stride(0))
    return all(
        stride % vector == 0 and x.data_ptr() % (vector * x.element_size()) == 0
        for x, stride in rows
    )


def _vector(q_THD: torch.Tensor, kv_TC: torch.Tensor) -> int:
    """Numbers of a vector: the most of 16 bytes that divide a head and a latent."""
    return math.gcd(q_THD.shape[2], kv_TC.shape[1], VECTOR_BYTES // q_THD.element_size())


def rope_and_cache_latent(
    q_THD: torch.Tensor,
    kv_TC: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin: CosSin,
    latents: CachedKV,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """See ``Operators.rope_and_cache_latent``."""
    values, token_scales = parts(latents)
    (rows, heads, q_dim), latent_dim = q_THD.shape, norm_weight.shape[0]
    rope_dim = kv_TC.shape[1] - latent_dim
    cos, sin = cos_sin
    assert values.shape[0] == 1 and values.is_contiguous() and token_scales.is_contiguous()
    assert q_THD.stride()[1:] == (q_dim, 1) and kv_TC.stride(1) == 1, (
        q_THD.stride(),
        kv_TC.stride(),
    )
    assert cos.shape[-1] == sin.shape[-1] == rope_dim and cos.stride() == sin.stride()
    assert rope_dim > 0 and rope_dim % 2 == 0 and cos.stride(0) % rope_dim == 0
    assert cos.stride(2) == 1 and cos.dtype == sin.dtype == torch.float32
    assert slots_T.dtype == torch.int64 and slots_T.is_contiguous()
    assert takes(q_THD, kv_TC) and q_THD.dtype == kv_TC.dtype, (q_THD.stride(), kv_TC.stride())
    if not rows:
        return q_THD
    vector, half = _vector(q_THD, kv_TC), next_power_of_2(rope_dim // 2)
    block_h = min(next_power_of_2(heads), max(1, _BLOCK // half))
    _store_latents[(rows, 1 + cdiv(heads, block_h))](
        q_THD,
        kv_TC,
        norm_weight,
        cos,
        sin,
        slots_T,
        values,
        token_scales,
        eps,
        whole_scale(latents),
        q_THD.stride(0) // vector,
        kv_TC.stride(0) // vector,
        cos.stride(0) // rope_dim,
        VECTOR=vector,
        VECTOR_BYTES=vector * q_THD.element_size(),
        HEADS=heads,
        NOPE_DIM=q_dim - rope_dim,
        ROPE_DIM=rope_dim,
        LATENT_DIM=latent_dim,
        BLOCK_C=next_power_of_2(latent_dim),
        BLOCK_R=half,
        BLOCK_H=block_h,
        IS_FP8=latents.dtype == FP8,
        IS_INT8=latents.dtype == INT8,
        **_OPTIONS,
    )
    return q_THD


@direct
@triton.jit(
    do_not_specialize=["q_row", "kv_row", "angle_row"],
    # Queries and latents are parts of one product's results, and slots of a step's inputs.
    do_not_specialize_on_alignment=["q_THD", "kv_TC", "slots_T"],
)
def _store_latents(
    q_THD: tl.tensor,
    kv_TC: tl.tensor,
    norm_weight: tl.tensor,
    cos_TR: tl.tensor,
    sin_TR: tl.tensor,
    slots_T: tl.tensor,
    latents: tl.tensor,
    token_scales: tl.tensor,
    eps: tl.tensor,
    whole_scale: tl.tensor,
    q_row: tl.tensor,
    kv_row: tl.tensor,
    angle_row: tl.tensor,
    VECTOR: tl.constexpr,
    VECTOR_BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_INT8: tl.constexpr,
) -> None:
    """The latent of a row, or some of its queries. Reads come before everything that depends on any
    of them: a program lasts hardly longer than one."""
    row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # Vectors are matrices of one row, like the rotated halves.
    offs_r = tl.arange(0, BLOCK_R)[None, :]
    HALF: tl.constexpr = ROPE_DIM // 2
    # Angles are equal in both halves, but for the sign of the first one's sine.
    angle = row * angle_row * ROPE_DIM + HALF + offs_r
    if program > 0:
        head = (program - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        q_mask = (head < HEADS) & (offs_r < HALF)
        q = tl.multiple_of(q_THD + row * q_row * VECTOR, VECTOR_BYTES)
        q += head * (NOPE_DIM + ROPE_DIM) + NOPE_DIM + offs_r
        cos = tl.load(cos_TR + angle, mask=offs_r < HALF, other=0.0)
        sin = tl.load(sin_TR + angle, mask=offs_r < HALF, other=0.0)
        q_first = tl.load(q, mask=q_mask, other=0.0)
        q_second = tl.load(q + HALF, mask=q_mask, other=0.0)
        q_first, q_second = _rotated(q_first, q_second, cos, sin)
        tl.store(q, q_first, mask=q_mask)
        tl.store(q + HALF, q_second, mask=q_mask)
    else:
        is_row, offs_c = tl.arange(0, 1)[:, None] < 1, tl.arange(0, BLOCK_C)[None, :]
        is_latent, is_half = is_row & (offs_c < LATENT_DIM), is_row & (offs_r < HALF)
        slot = tl.load(slots_T + row)
        kv = tl.multiple_of(kv_TC + row * kv_row * VECTOR, VECTOR_BYTES)
        x = tl.load(kv + offs_c, mask=is_latent, other=0.0).to(tl.float32)
        first = tl.load(kv + LATENT_DIM + offs_r, mask=is_half, other=0.0)
        second = tl.load(kv + LATENT_DIM + HALF + offs_r, mask=is_half, other=0.0)
        weight = tl.load(norm_weight + offs_c, mask=is_latent, other=0.0).to(tl.float32)
        cos = tl.load(cos_TR + angle, mask=is_half, other=0.0)
        sin = tl.load(sin_TR + angle, mask=is_half, other=0.0)
        rstd = tl.math.rsqrt(tl.sum(x * x, axis=1) / LATENT_DIM + eps)
        normed = (x * rstd[:, None] * weight).to(kv_TC.dtype.element_ty)
        first, second = _rotated(first, second, cos, sin)
        if slot >= 0:
            scale = whole_scale
            if IS_INT8:
                largest = tl.max(tl.abs(normed.to(tl.float32)))
                largest = tl.maximum(largest, tl.max(tl.abs(first.to(tl.float32))))
                largest = tl.maximum(largest, tl.max(tl.abs(second.to(tl.float32))))
                scale = tl.maximum(tl.div_rn(largest, _LARGEST), _SMALLEST)
                tl.store(token_scales + slot, scale)
            place = latents + slot * (LATENT_DIM + ROPE_DIM)
            code = _coded(normed, scale, latents, IS_FP8, IS_INT8)
            tl.store(place + offs_c, code, mask=is_latent)
            place += LATENT_DIM + offs_r
            tl.store(place, _coded(first, scale, latents, IS_FP8, IS_INT8), mask=is_half)
            tl.store(place + HALF, _coded(second, scale, latents, IS_FP8, IS_INT8), mask=is_half)


@triton.jit
def _rotated(
    first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of vectors, rotated against each other."""
    x, y = first.to(tl.float32), second.to(tl.float32)
    return (x * cos - y * sin).to(first.dtype), (y * cos + x * sin).to(first.dtype)


@triton.jit
def _coded(
    x: tl.tensor, scale: tl.tensor, latents: tl.tensor, IS_FP8: tl.constexpr, IS_INT8: tl.constexpr
) -> tl.tensor:
    """Numbers in the cache's dtype."""
    if IS_FP8 or IS_INT8:
        steps = tl.div_rn(x.to(tl.float32), tl.broadcast_to(scale, x.shape))
        codes = to_fp8(steps) if IS_FP8 else to_int8(steps)
    else:
        codes = x.to(latents.dtype.element_ty)
    return codes
