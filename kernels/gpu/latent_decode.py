"""Triton decode attention over a paged cache of latents, all decoding rows of a step in one launch.

    q [T, H, N + R], wide [H, T, C], latents [1, slots, C + R]   ->   sums [H, T, C]

``wide`` is the part of q without position times ``k_up``, so that a token's key for all heads is
its latent, and its value the first C numbers of it (``reference/latent.py``). A program attends to
one split of a row's tokens for some of its heads, and reads each latent once for keys and values. A
row with one split is written to ``sums``; the splits of others are combined by a second kernel.

Grids and workspaces depend on the numbers of rows and heads alone. Lengths and block tables are
read on the GPU only, so that a CUDA graph of the launches can be replayed with others. The most
splits of a row depend on the number of rows too: its result is the same in batches of one size.

Scores, sums and partial results are fp32; products are in the cache's dtype, or in q's if the cache
has one byte a value. fp8 and int8 are widened as in ``paged_decode.py``.

T rows of a step, D decoding rows, H query heads, S splits; dimensions: N of a query without
position, R of its rotated part, C of a latent.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..attention_metadata import DecodeMetadata
from ..fp8 import FP8
from ..scaled import INT8, CachedKV
from .cached_kv import (
    LOG2_E,
    converts_fp8,
    half_from_fp8,
    half_from_int8,
    parts,
    whole_scale,
    widened,
)
from .launch import cdiv, direct, next_power_of_2
from .paged_decode import processors

# The fewest tokens of a split. Fewer mean more splits to combine; more leave a GPU idle in small
# batches.
MIN_SPLIT = 256
# The most splits of a row, and the programs for each multiprocessor, beyond which rows have fewer
# splits: a program writes as many numbers for each head as a latent has, for the second kernel.
_MAX_SPLITS = 64
_PROGRAMS = 4
# Splits that are combined at a time, and heads of a program that combines.
_BLOCK_S = 8
_MIN_DOT = 16
# Heads of a program, by bytes of a number: fp32 is multiplied without tensor cores. With more
# heads, latents are read less often, but there are no registers to widen them in.
_BLOCK_H = {4: 4, 2: _MIN_DOT}
_BLOCK_H_MORE = 32
COMBINE_OPTIONS = {"num_warps": 4}


def attend_options(constants: dict[str, Any]) -> dict[str, int]:
    """Options of compilation of ``_attend_latents``: registers of more warps for more heads, and
    for fp8 that is widened through fp32."""
    by_bits = constants["IS_FP8"] and not constants["CONVERTS_FP8"]
    many = by_bits or constants["BLOCK_H"] == _BLOCK_H_MORE
    return {"num_warps": 8 if many else 4, "num_stages": 2 if many else 3}


def constants(
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: int,
    nope_dim: int,
    rope_dim: int,
    latent_dim: int,
    block_size: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile-time constants of ``_attend_latents`` and ``_combine_latents``."""
    block_h = _BLOCK_H[q_dtype.itemsize]
    if heads > block_h and q_dtype.itemsize == cache_dtype.itemsize == 2:
        block_h = _BLOCK_H_MORE
    shape = {
        "MIN_SPLIT": MIN_SPLIT,
        "HEADS": heads,
        "LATENT_DIM": latent_dim,
        "BLOCK_C": max(_MIN_DOT, next_power_of_2(latent_dim)),
    }
    attend = {
        "BLOCK_SIZE": block_size,
        "NOPE_DIM": nope_dim,
        "ROPE_DIM": rope_dim,
        "BLOCK_R": max(_MIN_DOT, next_power_of_2(rope_dim)),
        "BLOCK_H": block_h,
        "BLOCK_N": 16 if q_dtype == torch.float32 else 32,
        "IS_FP8": cache_dtype == FP8,
        "CONVERTS_FP8": cache_dtype == FP8 and converts_fp8(),
        "IS_INT8": cache_dtype == INT8,
    }
    return shape | attend, shape | {"BLOCK_S": _BLOCK_S}


def latent_decode(
    q_THD: torch.Tensor,
    wide_HTC: torch.Tensor,
    latents: CachedKV,
    decodes: DecodeMetadata,
    scale: float,
    sums_HTC: torch.Tensor,
) -> None:
    """Fill the decoding rows of ``sums``."""
    values, token_scales = parts(latents)
    heads, rows, latent_dim = wide_HTC.shape
    q_dim, rope_dim = q_THD.shape[2], values.shape[2] - latent_dim
    assert values.shape[0] == 1 and values.is_contiguous() and token_scales.is_contiguous()
    assert (
        wide_HTC.is_contiguous() and sums_HTC.is_contiguous() and q_THD.shape[:2] == (rows, heads)
    )
    assert sums_HTC.shape == wide_HTC.shape and 0 < rope_dim < q_dim, (q_THD.shape, values.shape)
    assert q_THD.stride()[1:] == (q_dim, 1), q_THD.stride()
    assert decodes.rows.dtype == decodes.tables.dtype == torch.int32
    if latents.dtype.itemsize > 1:
        q_THD, wide_HTC = q_THD.to(latents.dtype), wide_HTC.to(latents.dtype)
    attend, combine = constants(
        q_THD.dtype,
        latents.dtype,
        heads,
        q_dim - rope_dim,
        rope_dim,
        latent_dim,
        decodes.block_size,
    )
    count, blocks = len(decodes.rows), cdiv(heads, attend["BLOCK_H"])
    programs = _PROGRAMS * processors(wide_HTC.device)
    max_splits = max(1, min(_MAX_SPLITS, programs // (count * blocks)))
    several = count if max_splits > 1 else 0
    partial = wide_HTC.new_empty(several, heads, max_splits, latent_dim, dtype=torch.float32)
    lse = wide_HTC.new_empty(several, heads, max_splits, dtype=torch.float32)
    factor = whole_scale(latents)
    # Programs of a row's other heads are next to each other, so that they find latents in the L2.
    _attend_latents[(blocks, count, max_splits)](
        q_THD,
        wide_HTC,
        values,
        token_scales,
        decodes.rows,
        decodes.tables,
        partial,
        lse,
        sums_HTC,
        scale * factor * LOG2_E.value,
        factor,
        decodes.tables.stride(0),
        q_THD.stride(0),
        rows,
        **attend,
        **attend_options(attend),
    )
    if max_splits > 1:
        _combine_latents[(count, heads)](
            partial,
            lse,
            decodes.rows,
            sums_HTC,
            max_splits,
            rows,
            factor,
            **combine,
            **COMBINE_OPTIONS,
        )


@triton.jit
def latents_at(
    latents: tl.tensor,
    slot: tl.tensor,
    dtype: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IS_FP8: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
    IS_INT8: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The latents in some slots, [slots, C], and their rotated parts, [slots, R]; codes are widened
    to ``dtype``."""
    offs_c, offs_r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    place = latents + slot[:, None].to(tl.int64) * (LATENT_DIM + ROPE_DIM)
    k_c = tl.load(place + offs_c[None, :], mask=(offs_c < LATENT_DIM)[None, :], other=0)
    k_r = tl.load(place + LATENT_DIM + offs_r[None, :], mask=(offs_r < ROPE_DIM)[None, :], other=0)
    if IS_INT8:
        k_c, k_r = half_from_int8(k_c).to(dtype), half_from_int8(k_r).to(dtype)
    elif CONVERTS_FP8:
        k_c, k_r = half_from_fp8(k_c).to(dtype), half_from_fp8(k_r).to(dtype)
    elif IS_FP8:
        k_c, k_r = widened(k_c).to(dtype), widened(k_r).to(dtype)
    return k_c, k_r


@triton.jit
def _split(
    length: tl.tensor, max_splits: tl.tensor, MIN_SPLIT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The number of splits of a row, and the tokens of each."""
    size = tl.cdiv(tl.cdiv(length, max_splits), 64) * 64
    size = tl.maximum(size, MIN_SPLIT)
    return tl.cdiv(length, size), size


@direct
@triton.jit(do_not_specialize=["table_stride", "q_row", "step_rows"])
def _attend_latents(
    q_THD: tl.tensor,
    wide_HTC: tl.tensor,
    latents: tl.tensor,
    token_scales: tl.tensor,
    rows: tl.tensor,
    tables: tl.tensor,
    partial_DHSC: tl.tensor,
    lse_DHS: tl.tensor,
    sums_HTC: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    table_stride: tl.tensor,
    q_row: tl.tensor,
    step_rows: tl.tensor,
    MIN_SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_FP8: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
    IS_INT8: tl.constexpr,
) -> None:
    """Attend to one split of one row, for some of its heads."""
    number, split, max_splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    entry = rows + number * 3
    row, length = tl.load(entry).to(tl.int64), tl.load(entry + 2)
    count, size = _split(length, max_splits, MIN_SPLIT)
    if split < count:
        begin = split * size
        end = tl.minimum(begin + size, length)
        table = tables + tl.load(entry + 1).to(tl.int64) * table_stride
        head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
        offs_c, offs_r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
        is_head = head < HEADS
        c_mask = is_head[:, None] & (offs_c < LATENT_DIM)[None, :]
        r_mask = is_head[:, None] & (offs_r < ROPE_DIM)[None, :]
        at = head.to(tl.int64) * step_rows + row
        c_offs = at[:, None] * LATENT_DIM + offs_c[None, :]
        q_c = tl.load(wide_HTC + c_offs, mask=c_mask, other=0.0)
        r_offs = row * q_row + head[:, None] * (NOPE_DIM + ROPE_DIM) + NOPE_DIM + offs_r[None, :]
        q_r = tl.load(q_THD + r_offs, mask=r_mask, other=0.0)
        if (CONVERTS_FP8 or IS_INT8) and q_c.dtype == tl.bfloat16:
            # fp16 has a smaller range than bfloat16, so each head is divided by its largest value.
            c_wide, r_wide = q_c.to(tl.float32), q_r.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(c_wide), axis=1), tl.max(tl.abs(r_wide), axis=1))
            largest = tl.maximum(largest, 1e-30)[:, None]
            q_c, q_r = (c_wide / largest).to(tl.float16), (r_wide / largest).to(tl.float16)
            scales = scale * largest
        else:
            scales = scale
        m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
        acc_scale = 1e-30
        # Blocks are looked up a tile ahead, so that copies of several tiles are under way at once.
        # Behind the end, the last token is read again: without that bound, Triton would conclude
        # that all slots are aligned like the first ones of blocks, and copy too many bytes at once.
        token = tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1)
        block = tl.load(table + token // BLOCK_SIZE)
        for tile in range(begin, end, BLOCK_N):
            slot = block * BLOCK_SIZE + token % BLOCK_SIZE
            k_c, k_r = latents_at(
                latents,
                slot,
                q_c.dtype,
                LATENT_DIM,
                BLOCK_C,
                ROPE_DIM,
                BLOCK_R,
                IS_FP8,
                CONVERTS_FP8,
                IS_INT8,
            )
            qk = tl.dot(q_c, tl.trans(k_c), input_precision="ieee")
            qk = tl.dot(q_r, tl.trans(k_r), qk, input_precision="ieee") * scales
            if IS_INT8:
                token_scale = tl.load(token_scales + slot)
                qk = qk * token_scale[None, :]
            inside = tile + tl.arange(0, BLOCK_N) < end
            qk = tl.where(inside[None, :], qk, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(qk, axis=1))
            p = tl.exp2(qk - m_new[:, None])
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, axis=1)
            if IS_INT8:  # sums are relative to the largest scale so far, so that products fit fp16
                new_scale = tl.maximum(acc_scale, tl.max(token_scale, axis=0))
                p = p * (token_scale / new_scale)[None, :]
                alpha = alpha * (acc_scale / new_scale)
                acc_scale = new_scale
            acc = tl.dot(p.to(k_c.dtype), k_c, acc * alpha[:, None], input_precision="ieee")
            m_i = m_new
            token = tl.minimum(tile + BLOCK_N + tl.arange(0, BLOCK_N), end - 1)
            block = tl.load(table + token // BLOCK_SIZE)
        values = acc / l_i[:, None]
        if IS_INT8:
            values = values * acc_scale
        if count == 1:
            whole = (values * value_scale).to(sums_HTC.dtype.element_ty)
            tl.store(sums_HTC + c_offs, whole, mask=c_mask)
        else:
            at = (number.to(tl.int64) * HEADS + head) * max_splits + split
            tl.store(lse_DHS + at, m_i + tl.log2(l_i), mask=is_head)
            part = partial_DHSC + at[:, None] * LATENT_DIM + offs_c[None, :]
            tl.store(part, values, mask=c_mask)


@direct
@triton.jit(do_not_specialize=["max_splits", "step_rows"])
def _combine_latents(
    partial_DHSC: tl.tensor,
    lse_DHS: tl.tensor,
    rows: tl.tensor,
    sums_HTC: tl.tensor,
    max_splits: tl.tensor,
    step_rows: tl.tensor,
    value_scale: tl.tensor,
    MIN_SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Combine the splits of one head of one row, if it has several, by their log-sum-exps."""
    number, head = tl.program_id(0), tl.program_id(1)
    entry = rows + number * 3
    row, length = tl.load(entry).to(tl.int64), tl.load(entry + 2)
    count, _ = _split(length, max_splits, MIN_SPLIT)
    if count > 1:
        at = (number.to(tl.int64) * HEADS + head) * max_splits
        offs_c = tl.arange(0, BLOCK_C)
        m_i = tl.full([1], float("-inf"), tl.float32)
        l_i = tl.zeros([1], tl.float32)
        acc = tl.zeros([BLOCK_C], tl.float32)
        for begin in range(0, count, BLOCK_S):
            split = begin + tl.arange(0, BLOCK_S)
            lse = tl.load(lse_DHS + at + split, mask=split < count, other=float("-inf"))
            there = (split < count)[:, None] & (offs_c < LATENT_DIM)[None, :]
            part = partial_DHSC + (at + split)[:, None] * LATENT_DIM + offs_c[None, :]
            values = tl.load(part, mask=there, other=0.0)
            m_new = tl.maximum(m_i, tl.max(lse, axis=0))
            p = tl.exp2(lse - m_new)
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, axis=0)
            acc = acc * alpha + tl.sum(p[:, None] * values, axis=0)
            m_i = m_new
        place = sums_HTC + (head.to(tl.int64) * step_rows + row) * LATENT_DIM + offs_c
        values = (acc / l_i * value_scale).to(sums_HTC.dtype.element_ty)
        tl.store(place, values, mask=offs_c < LATENT_DIM)
