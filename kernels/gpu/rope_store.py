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

import torch
import triton
import triton.language as tl

from ..fp8 import FP8, indexable
from ..scaled import INT8, LARGEST, SMALLEST, CachedKV, ScaledKV, TensorScaledKV
from ..signatures import CosSin, LayerKV
from .cached_kv import to_fp8, to_int8
from .launch import cdiv, direct, next_power_of_2

VECTOR_BYTES = 16
# Numbers of a program, and its warps: a thread has a vector of each half of a head. Without the
# bound, ptxas saves registers, and reads the weight and the angles only when the heads are there.
_BLOCK = 1024
_OPTIONS = {"num_warps": 2, "maxnreg": 64}
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
    block_h = min(next_power_of_2(max(heads, kv_heads)), max(1, _BLOCK // next_power_of_2(dim)))
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
        HALF=rotated // 2,
        HAS_NORM=norm_weight_RD is not None,
        IS_FP8=keys_KND is not None and keys_KND.dtype == FP8,
        IS_INT8=keys_KND is not None and keys_KND.dtype == INT8,
        HAS_SCALE=isinstance(keys_KND, TensorScaledKV),
        BLOCK_H=block_h,
        BLOCK_R=next_power_of_2(max(1, rotated // 2)),
        BLOCK_S=next_power_of_2(max(1, dim - rotated)),
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
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Some query, key or value heads of a row. Reads come before everything that depends on any of
    them: a program lasts hardly longer than one."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    K_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    is_query, is_value = block < Q_BLOCKS, block >= Q_BLOCKS + K_BLOCKS
    first_block = tl.where(is_query, 0, tl.where(is_value, Q_BLOCKS + K_BLOCKS, Q_BLOCKS))
    first_head = tl.where(is_query, 0, tl.where(is_value, NUM_HEADS + KV_HEADS, NUM_HEADS))
    head = (block - first_block) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    there = head < tl.where(is_query, NUM_HEADS, KV_HEADS)
    offs_r = tl.broadcast_to(tl.arange(0, BLOCK_R)[None, :], BLOCK_H, BLOCK_R)
    offs_s = tl.broadcast_to(tl.arange(0, BLOCK_S)[None, :], BLOCK_H, BLOCK_S)
    mask_r, mask_s = there & (offs_r < HALF), there & (offs_s < HEAD_DIM - 2 * HALF)

    slot = tl.load(slots_T + row) if KV_HEADS else row
    x = qkv_TXD + row * x_row * HEAD_DIM + (first_head + head) * HEAD_DIM
    first, second, rest = _heads(x, offs_r, offs_s, mask_r, mask_s, HEAD_DIM, HALF)
    if not is_value:
        weight = norm_weight_RD + (first_head + head) * HEAD_DIM
        cos = cos_TD + row * angle_row * 2 * HALF
        sin = sin_TD + row * angle_row * 2 * HALF
        first, second, rest = _rotated(
            first, second, rest, weight, cos, sin, eps,
            offs_r, offs_s, mask_r, mask_s, HEAD_DIM, HALF, HAS_NORM,
        )  # fmt: skip
    if is_query:
        q = q_THD + (row * NUM_HEADS + head) * HEAD_DIM
        _store(q, first, second, rest, offs_r, offs_s, mask_r, mask_s, HEAD_DIM, HALF)
    elif KV_HEADS:
        there = head < tl.where(slot >= 0, KV_HEADS, 0)
        mask_r, mask_s = mask_r & there, mask_s & there
        at = head.to(tl.int64) * slots + slot
        if is_value:
            _cache(
                first, second, rest, values_KND, value_scales_KN, value_factor,
                at, offs_r, offs_s, mask_r, mask_s, there,
                HEAD_DIM, HALF, IS_FP8, IS_INT8, HAS_SCALE,
            )  # fmt: skip
        else:
            _cache(
                first, second, rest, keys_KND, key_scales_KN, key_factor,
                at, offs_r, offs_s, mask_r, mask_s, there,
                HEAD_DIM, HALF, IS_FP8, IS_INT8, HAS_SCALE,
            )  # fmt: skip


@triton.jit
def _heads(
    at: tl.tensor,
    offs_r: tl.tensor,
    offs_s: tl.tensor,
    mask_r: tl.tensor,
    mask_s: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Both halves of the rotated dimensions of heads, and the rest."""
    first = tl.zeros(offs_r.shape, at.dtype.element_ty)
    second, rest = first, tl.zeros(offs_s.shape, at.dtype.element_ty)
    if HALF:
        first = tl.load(at + offs_r, mask=mask_r, other=0.0)
        second = tl.load(at + HALF + offs_r, mask=mask_r, other=0.0)
    if HEAD_DIM > 2 * HALF:
        rest = tl.load(at + 2 * HALF + offs_s, mask=mask_s, other=0.0)
    return first, second, rest


@triton.jit
def _store(
    at: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    rest: tl.tensor,
    offs_r: tl.tensor,
    offs_s: tl.tensor,
    mask_r: tl.tensor,
    mask_s: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """The reverse."""
    if HALF:
        tl.store(at + offs_r, first, mask=mask_r)
        tl.store(at + HALF + offs_r, second, mask=mask_r)
    if HEAD_DIM > 2 * HALF:
        tl.store(at + 2 * HALF + offs_s, rest, mask=mask_s)


@triton.jit
def _rotated(
    first: tl.tensor,
    second: tl.tensor,
    rest: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    offs_r: tl.tensor,
    offs_s: tl.tensor,
    mask_r: tl.tensor,
    mask_s: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Heads, normed and rotated."""
    dtype: tl.constexpr = first.dtype
    if HALF:  # angles are equal in both halves, but for the sign of the first one's sine
        cos_R = tl.load(cos + offs_r, mask=offs_r < HALF, other=0.0)
        sin_R = tl.load(sin + HALF + offs_r, mask=offs_r < HALF, other=0.0)
    if HAS_NORM:
        weights = _heads(weight, offs_r, offs_s, mask_r, mask_s, HEAD_DIM, HALF)
        x, y, z = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
        squares = tl.sum(x * x + y * y, axis=1)
        if HEAD_DIM > 2 * HALF:
            squares += tl.sum(z * z, axis=1)
        rstd = tl.math.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first, second = _weighted(first, rstd, weights[0]), _weighted(second, rstd, weights[1])
        rest = _weighted(rest, rstd, weights[2])
    if HALF:
        x, y = first.to(tl.float32), second.to(tl.float32)
        first, second = (x * cos_R - y * sin_R).to(dtype), (y * cos_R + x * sin_R).to(dtype)
    return first, second, rest


@triton.jit
def _weighted(x: tl.tensor, rstd: tl.tensor, weight: tl.tensor) -> tl.tensor:
    normed = (x.to(tl.float32) * rstd).to(x.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _cache(
    first: tl.tensor,
    second: tl.tensor,
    rest: tl.tensor,
    cache_KND: tl.tensor,
    scales_KN: tl.tensor,
    factor: tl.tensor,
    at: tl.tensor,
    offs_r: tl.tensor,
    offs_s: tl.tensor,
    mask_r: tl.tensor,
    mask_s: tl.tensor,
    there: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> None:
    """Write heads to the cache in its dtype."""
    scale = factor
    if IS_INT8:
        x, y, z = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(x), tl.abs(y)), axis=1, keep_dims=True)
        if HEAD_DIM > 2 * HALF:
            largest = tl.maximum(largest, tl.max(tl.abs(z), axis=1, keep_dims=True))
        scales = tl.maximum(tl.div_rn(largest, _LARGEST), _SMALLEST)
        tl.store(scales_KN + at, scales, mask=there)
        scale = 1 / scales
    place = cache_KND + at * HEAD_DIM
    _store(
        place,
        _coded(first, scale, cache_KND, IS_FP8, IS_INT8, HAS_SCALE),
        _coded(second, scale, cache_KND, IS_FP8, IS_INT8, HAS_SCALE),
        _coded(rest, scale, cache_KND, IS_FP8, IS_INT8, HAS_SCALE),
        offs_r, offs_s, mask_r, mask_s, HEAD_DIM, HALF,
    )  # fmt: skip


@triton.jit
def _coded(
    x: tl.tensor,
    scale: tl.tensor,
    cache_KND: tl.tensor,
    IS_FP8: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> tl.tensor:
    """Numbers in the cache's dtype."""
    if IS_INT8:
        codes = to_int8(x.to(tl.float32) * scale)
    elif IS_FP8:
        wide = x.to(tl.float32)
        codes = to_fp8(wide * scale if HAS_SCALE else wide)
    else:
        codes = x.to(cache_KND.dtype.element_ty)
    return codes
