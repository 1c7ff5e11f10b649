"""Triton norm and rotation of heads and the write of K and V to the paged cache, in one launch.

    qkv [T, X, D]   ->   q [T, H, D], keys and values [K, N, D] at slots [T]

A program takes some heads of one kind of a row. Normed and rotated heads are rounded to the dtype
of the activations, as torch's operators round them, and then to the cache's; fp8 by integer
instructions, which all GPUs have. A row with a negative slot is not cached. Strides of rows are
counted in heads, so that Triton compiles one kernel for all strides and knows their alignment.

T rows, H query heads, K KV heads, R = H + K heads that are rotated, X = H + 2 K heads of a row, D
head dimension, N slots of the cache.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..fp8 import FP8, indexable
from ..scaled import INT8, LARGEST, SMALLEST, CachedKV, ScaledKV, TensorScaledKV
from ..signatures import CosSin, LayerKV
from .cached_kv import to_fp8, to_int8
from .launch import cdiv, direct, next_power_of_2

VECTOR_BYTES = 16
# Numbers of a program, and its warps.
_BLOCK = 2048
_OPTIONS = {"num_warps": 4}
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST)


def takes(qkv_TXD: torch.Tensor, cos_sin: CosSin) -> bool:
    """True if the kernel can read these heads and angles."""
    stride_row, stride_head, stride_dim = qkv_TXD.stride()
    dim, (cos, sin) = qkv_TXD.shape[2], cos_sin
    if stride_dim != 1 or stride_head != dim or stride_row % dim:
        return False
    angles = cos.stride()
    if angles != sin.stride() or angles[2] != 1 or angles[0] % max(1, cos.shape[2]):
        return False
    return not (qkv_TXD.data_ptr() | cos.data_ptr() | sin.data_ptr()) % VECTOR_BYTES


def rope_and_cache_kv(
    qkv_TXD: torch.Tensor,
    norm_weight_RD: torch.Tensor | None,
    eps: float,
    cos_sin: CosSin,
    cache: LayerKV,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """See ``Operators.rope_and_cache_kv``."""
    keys, values = cache
    assert slots_T.dtype == torch.int64 and slots_T.is_contiguous()
    return _launch(qkv_TXD, norm_weight_RD, eps, cos_sin, keys, values, slots_T)


def rope_queries(
    q_THD: torch.Tensor, norm_weight_HD: torch.Tensor | None, eps: float, cos_sin: CosSin
) -> torch.Tensor:
    """See ``Operators.rope_queries``."""
    return _launch(q_THD, norm_weight_HD, eps, cos_sin, None, None, None)


def _launch(
    qkv_TXD: torch.Tensor,
    norm_weight_RD: torch.Tensor | None,
    eps: float,
    cos_sin: CosSin,
    keys_KND: CachedKV | None,
    values_KND: CachedKV | None,
    slots_T: torch.Tensor | None,
) -> torch.Tensor:
    """For heads and angles that the kernel ``takes``."""
    rows, width, dim = qkv_TXD.shape
    kv_heads = 0 if keys_KND is None else keys_KND.shape[0]
    heads = width - 2 * kv_heads
    cos, sin = cos_sin
    rotated = cos.shape[-1]
    assert cos.dtype == sin.dtype == torch.float32 and rotated % 2 == 0
    assert norm_weight_RD is None or (
        norm_weight_RD.shape == (heads + kv_heads, dim) and norm_weight_RD.is_contiguous()
    )
    q_THD = qkv_TXD.new_empty(rows, heads, dim)
    if not rows:
        return q_THD
    keys, key_scales, key_factor = _parts(q_THD if keys_KND is None else keys_KND)
    values, value_scales, value_factor = _parts(q_THD if values_KND is None else values_KND)
    assert keys.shape == values.shape and keys.is_contiguous() and values.is_contiguous()
    assert keys.shape[2] == dim, (keys.shape, dim)
    block_d = next_power_of_2(dim)
    block_h = max(1, min(next_power_of_2(max(heads, kv_heads)), _BLOCK // block_d))
    blocks = cdiv(heads, block_h) + 2 * cdiv(kv_heads, block_h)
    _rope_store[(rows, blocks)](
        qkv_TXD,
        qkv_TXD if norm_weight_RD is None else norm_weight_RD,
        cos,
        sin,
        cos if slots_T is None else slots_T,
        q_THD,
        keys,
        values,
        key_scales,
        value_scales,
        key_factor,
        value_factor,
        eps,
        qkv_TXD.stride(0) // dim,
        cos.stride(0) // max(1, rotated),
        keys.shape[1],
        NUM_HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        ROTATED=rotated,
        VECTOR=math.gcd(rotated // 2, VECTOR_BYTES // qkv_TXD.element_size()),
        HAS_NORM=norm_weight_RD is not None,
        IS_FP8=keys_KND is not None and keys_KND.dtype == FP8,
        IS_INT8=keys_KND is not None and keys_KND.dtype == INT8,
        HAS_SCALE=isinstance(keys_KND, TensorScaledKV),
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        **_OPTIONS,
    )
    return q_THD


def _parts(cached: CachedKV) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Values, the scale of each head and slot, and what all are multiplied by. Without scales of
    heads, the values twice; the second is never written."""
    if isinstance(cached, ScaledKV):
        assert cached.scales.is_contiguous()
        return cached.values, cached.scales, 1.0
    if isinstance(cached, TensorScaledKV):
        return indexable(cached.values), indexable(cached.values), 1 / cached.scale
    return indexable(cached), indexable(cached), 1.0


@direct
@triton.jit(
    do_not_specialize=["x_row", "angle_row", "slots"],
    do_not_specialize_on_alignment=["slots_T"],  # they are a slice of a step's inputs
)
def _rope_store(
    qkv_TXD: tl.tensor,
    norm_weight_RD: tl.tensor,
    cos_TD: tl.tensor,
    sin_TD: tl.tensor,
    slots_T: tl.tensor,
    q_THD: tl.tensor,
    keys_KND: tl.tensor,
    values_KND: tl.tensor,
    key_scales_KN: tl.tensor,
    value_scales_KN: tl.tensor,
    key_factor: tl.tensor,
    value_factor: tl.tensor,
    eps: tl.tensor,
    x_row: tl.tensor,
    angle_row: tl.tensor,
    slots: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Some query, key or value heads of a row."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_h, offs_d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    x = qkv_TXD + row * x_row * HEAD_DIM
    cos, sin = cos_TD + row * angle_row * ROTATED, sin_TD + row * angle_row * ROTATED
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    K_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    if block < Q_BLOCKS:
        head = block * BLOCK_H + offs_h
        mask = (head < NUM_HEADS)[:, None] & (offs_d < HEAD_DIM)[None, :]
        q = _rotated(
            x,
            norm_weight_RD,
            cos,
            sin,
            head,
            offs_d,
            mask,
            eps,
            HEAD_DIM,
            ROTATED,
            VECTOR,
            HAS_NORM,
        )
        place = q_THD + (row * NUM_HEADS + head[:, None]) * HEAD_DIM + offs_d[None, :]
        tl.store(place, q, mask=mask)
    elif KV_HEADS:
        is_key = block < Q_BLOCKS + K_BLOCKS
        head = (block - Q_BLOCKS - tl.where(is_key, 0, K_BLOCKS)) * BLOCK_H + offs_h
        mask = (head < KV_HEADS)[:, None] & (offs_d < HEAD_DIM)[None, :]
        slot = tl.load(slots_T + row)
        at = head.to(tl.int64) * slots + slot
        if slot >= 0:
            if is_key:
                its_head = NUM_HEADS + head
                k = _rotated(
                    x,
                    norm_weight_RD,
                    cos,
                    sin,
                    its_head,
                    offs_d,
                    mask,
                    eps,
                    HEAD_DIM,
                    ROTATED,
                    VECTOR,
                    HAS_NORM,
                )
                _cache(
                    k,
                    keys_KND,
                    key_scales_KN,
                    key_factor,
                    at,
                    offs_d,
                    mask,
                    HEAD_DIM,
                    IS_FP8,
                    IS_INT8,
                    HAS_SCALE,
                )
            else:
                its_head = NUM_HEADS + KV_HEADS + head
                v = tl.load(
                    x + its_head[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0
                )
                _cache(
                    v,
                    values_KND,
                    value_scales_KN,
                    value_factor,
                    at,
                    offs_d,
                    mask,
                    HEAD_DIM,
                    IS_FP8,
                    IS_INT8,
                    HAS_SCALE,
                )


@triton.jit
def _rotated(
    x: tl.tensor,
    norm_weight_RD: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    head: tl.tensor,
    offs_d: tl.tensor,
    mask: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> tl.tensor:
    """Heads of a row, normed and rotated. The dimension that another is rotated with is read once
    more, from the L1 cache."""
    HALF: tl.constexpr = ROTATED // 2
    other_d = offs_d + tl.where(offs_d < HALF, HALF, tl.where(offs_d < ROTATED, -HALF, 0))
    other_d = tl.max_contiguous(tl.multiple_of(other_d, VECTOR), VECTOR)
    at = head[:, None] * HEAD_DIM + offs_d[None, :]
    other_at = head[:, None] * HEAD_DIM + other_d[None, :]
    out = tl.load(x + at, mask=mask, other=0.0)
    dtype: tl.constexpr = out.dtype
    if HAS_NORM:
        wide = out.to(tl.float32)
        rstd = tl.math.rsqrt(tl.sum(wide * wide, axis=1) / HEAD_DIM + eps)[:, None]
        out = _weighted(out, rstd, tl.load(norm_weight_RD + at, mask=mask, other=0.0))
    if ROTATED:
        other = tl.load(x + other_at, mask=mask, other=0.0)
        if HAS_NORM:
            weight = tl.load(norm_weight_RD + other_at, mask=mask, other=0.0)
            other = _weighted(other, rstd, weight)
        turns = offs_d < ROTATED
        cos_D = tl.load(cos + offs_d, mask=turns, other=0.0)[None, :]
        sin_D = tl.load(sin + offs_d, mask=turns, other=0.0)[None, :]
        turned = (out.to(tl.float32) * cos_D + other.to(tl.float32) * sin_D).to(dtype)
        out = turned if ROTATED == HEAD_DIM else tl.where(turns[None, :], turned, out)
    return out


@triton.jit
def _weighted(x: tl.tensor, rstd: tl.tensor, weight: tl.tensor) -> tl.tensor:
    normed = (x.to(tl.float32) * rstd).to(x.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _cache(
    x: tl.tensor,
    cache_KND: tl.tensor,
    scales_KN: tl.tensor,
    factor: tl.tensor,
    at: tl.tensor,
    offs_d: tl.tensor,
    mask: tl.tensor,
    HEAD_DIM: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> None:
    """Write heads to the cache in its dtype."""
    place = cache_KND + at[:, None] * HEAD_DIM + offs_d[None, :]
    if IS_FP8:
        wide = x.to(tl.float32)
        tl.store(place, to_fp8(wide * factor if HAS_SCALE else wide), mask=mask)
    elif IS_INT8:
        wide = x.to(tl.float32)
        largest = tl.max(tl.abs(wide), axis=1)
        scales = tl.maximum(tl.div_rn(largest, _LARGEST), _SMALLEST)
        tl.store(place, to_int8(wide * (1 / scales)[:, None]), mask=mask)
        tl.store(scales_KN + at, scales, mask=tl.max(mask.to(tl.int32), axis=1) > 0)
    else:
        tl.store(place, x.to(cache_KND.dtype.element_ty), mask=mask)
