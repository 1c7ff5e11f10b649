"""Triton attention of chunks over the paged cache, all chunks of a step in one launch.

    q [T, H, D]   keys, values [K, N, D]   ->   out [T, H, D], whose rows of chunks are filled

The G query heads of a KV head make one tile with as many rows of a chunk as fit ``BLOCK_M``; a
program attends with one tile. It finds its chunk itself, so that one list of chunks serves kernels
with tiles of any size. Blocks of tokens are attended one after the other, with the running maximum
and sum of each row (Dao et al. 2022, "FlashAttention"). Scores and sums are fp32; products are in
the cache's dtype, or in q's if the cache has one byte a value, as in ``paged_decode.py``.

T rows of a step, C chunks, H query heads, K KV heads, G = H / K, D head dimension, N slots of the
cache. Strides are counted in heads, so that Triton compiles one kernel for all strides and knows
that they are multiples of D.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import current_target

from ..attention_metadata import AttentionParams, ChunkMetadata
from ..fp8 import FP8
from ..scaled import INT8, CachedKV
from .cached_kv import (
    LOG2_E,
    converts_fp8,
    factors,
    from_int8,
    half_queries,
    parts,
    whole_scale,
    widened,
)
from .launch import cached_for_gpu, direct, next_power_of_2

# The fewest rows or columns of a tensor core's product.
MIN_DOT = 16
# Values of a block of keys, and of the sums of a tile's rows, which are in registers. float32 is
# multiplied without tensor cores, from registers.
_BLOCK_VALUES, _BLOCK_VALUES_FP32 = 8 << 10, 4 << 10
_TILE_VALUES, _TILE_VALUES_FP32 = 16 << 10, 8 << 10
_MAX_M, _MAX_M_FP32 = 128, 32
_MAX_N, _MAX_N_FP32 = 128, 32
# The fewest rows that are multiplied asynchronously, and tokens for which sums are scaled, where
# shared memory has room for them.
_MIN_WIDE_M, _MIN_WIDE_N = 64, 32
# Lower than every score, and finite, so that its difference from itself is zero.
LOWEST = tl.constexpr(-3.4e38)
# What a share of the values is at most in fp16, whose smallest is then 2e-12 of it.
FP16_SHARE = tl.constexpr(32768.0)
_WARPS = 8


@cached_for_gpu
def constants(
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    params: AttentionParams,
    block_size: int,
) -> dict[str, Any]:
    """Compile-time constants of ``_attend_chunks``, and its options of compilation."""
    block_d = max(MIN_DOT, next_power_of_2(dim))
    group = heads // kv_heads
    if q_dtype == torch.float32:
        rows = min(_MAX_M_FP32, _TILE_VALUES_FP32 // block_d)
        tokens = min(_MAX_N_FP32, _BLOCK_VALUES_FP32 // block_d)
    else:
        rows, tokens = _TILE_VALUES // block_d, min(_MAX_N, _BLOCK_VALUES // block_d)
        if _is_wide():
            rows *= 2 if cache_dtype.itemsize == 2 else 1
            rows, tokens = max(rows, _MIN_WIDE_M), max(tokens, _MIN_WIDE_N)
        elif cache_dtype.itemsize == 1:
            rows //= 2  # codes are widened in registers
        rows = min(_MAX_M, rows)
    return {
        "WINDOW": params.window or 0,
        "CAUSAL": params.causal,
        "HAS_CAP": params.soft_cap is not None,
        "HAS_SINKS": params.sinks,
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "BLOCK_M": max(MIN_DOT, rows, next_power_of_2(group)),
        "BLOCK_N": max(MIN_DOT, tokens),
        "HEAD_DIM": dim,
        "BLOCK_D": block_d,
        "IS_FP8": cache_dtype == FP8,
        "CONVERTS_FP8": cache_dtype == FP8 and converts_fp8(),
        "IS_INT8": cache_dtype == INT8,
        "num_warps": _WARPS,
        # A tile is copied two iterations ahead, if it fits: copies take longer than its products.
        "num_stages": 1 if q_dtype == torch.float32 else 3 if _is_wide() and block_d <= 256 else 2,
    }


def _is_wide() -> bool:
    """True if the GPU to compile for has over 200 KiB of shared memory for a program: NVIDIA's
    since sm_90, except consumers'."""
    target = current_target()
    return target is not None and target.backend == "cuda" and 90 <= target.arch < 120


def chunk_attention(
    q_THD: torch.Tensor,
    keys_KND: CachedKV,
    values_KND: CachedKV,
    chunks: ChunkMetadata,
    params: AttentionParams,
    out_THD: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
    span_ends_T: torch.Tensor | None = None,
) -> None:
    """Fill the chunks' rows of ``out``.

    ``sinks`` are fp32 scores, if ``params`` has them. Rows with one of ``span_ends``, int32, also
    attend to later tokens of their chunk, those at positions below it: the tokens of an image see
    each other.
    """
    assert params.sinks == (sinks_H is not None) and params.scale > 0
    assert sinks_H is None or (sinks_H.dtype == torch.float32 and sinks_H.is_contiguous())
    assert span_ends_T is None or (span_ends_T.dtype == torch.int32 and params.causal)
    keys, key_scales = parts(keys_KND)
    values, value_scales = parts(values_KND)
    heads, dim = q_THD.shape[1:]
    kv_heads, count = keys.shape[0], len(chunks.chunks)
    assert keys.shape == values.shape and keys.is_contiguous() and values.is_contiguous()
    assert keys.shape[2] == dim and heads % kv_heads == 0, (q_THD.shape, keys.shape)
    assert key_scales.is_contiguous() and value_scales.is_contiguous()
    assert chunks.chunks.dtype == chunks.tables.dtype == torch.int32
    if keys.dtype == INT8:  # read in words
        keys, values = keys.view(torch.int32), values.view(torch.int32)
    q_THD = q_THD if keys_KND.dtype.itemsize == 1 else q_THD.to(keys_KND.dtype)
    assert out_THD.shape == q_THD.shape
    q_row, out_row = q_THD.stride(0), out_THD.stride(0)
    assert q_THD.stride()[1:] == out_THD.stride()[1:] == (dim, 1)
    assert q_row % dim == out_row % dim == 0, (q_row, out_row)
    fixed = constants(q_THD.dtype, keys_KND.dtype, heads, kv_heads, dim, params, chunks.block_size)
    # As many as there may be, however the rows are divided between chunks.
    row_blocks = len(q_THD) // (fixed["BLOCK_M"] // fixed["GROUP"]) + count
    _attend_chunks[(kv_heads, row_blocks)](
        q_THD,
        keys,
        values,
        key_scales,
        value_scales,
        chunks.chunks,
        chunks.tables,
        chunks.chunks if sinks_H is None else sinks_H,
        chunks.chunks if span_ends_T is None else span_ends_T,
        out_THD,
        *factors(params, whole_scale(keys_KND)),
        whole_scale(values_KND),
        count,
        chunks.tables.stride(0),
        q_row // dim,
        out_row // dim,
        keys.shape[1],
        HAS_SPANS=span_ends_T is not None,
        **fixed,
    )


@triton.jit
def find_rows(
    chunks: tl.tensor, count: tl.tensor, number: tl.tensor, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The entry of the chunk of a row block, ``ROWS`` rows, and the first of them in the chunk,
    which is outside of it if the block has none."""
    # Chunk c has the row blocks from (its first row) // ROWS + c on.
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(chunks + middle * 4) // ROWS + middle <= number:
            low = middle
        else:
            high = middle
    entry = chunks + low * 4
    return entry, (number - tl.load(entry) // ROWS - low) * ROWS


@triton.jit
def _heads_and_rows(
    offs_m: tl.tensor,
    kv_head: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Each tile row's head and row of its chunk, and whether it is there; others are as the
    last."""
    of_chunk = first + offs_m // GROUP
    real = of_chunk < num_rows
    if BLOCK_M % GROUP != 0:
        real = real & (offs_m < BLOCK_M // GROUP * GROUP)
    return kv_head * GROUP + offs_m % GROUP, tl.minimum(of_chunk, num_rows - 1), real


@direct
@triton.jit(do_not_specialize=["count", "table_stride", "q_row", "out_row", "slots"])
def _attend_chunks(
    q_THD: tl.tensor,
    keys_KND: tl.tensor,
    values_KND: tl.tensor,
    key_scales_KN: tl.tensor,
    value_scales_KN: tl.tensor,
    chunks: tl.tensor,
    tables: tl.tensor,
    sinks_H: tl.tensor,
    span_ends_T: tl.tensor,
    out_THD: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    value_scale: tl.tensor,
    count: tl.tensor,
    table_stride: tl.tensor,
    q_row: tl.tensor,
    out_row: tl.tensor,
    slots: tl.tensor,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_FP8: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
    IS_INT8: tl.constexpr,
) -> None:
    """Attend with some rows of one chunk, for the query heads of one KV head."""
    ROWS: tl.constexpr = BLOCK_M // GROUP
    # int8 is read in words of four.
    KV_WIDTH: tl.constexpr = HEAD_DIM // 4 if IS_INT8 else HEAD_DIM
    BLOCK_W: tl.constexpr = BLOCK_D // 4 if IS_INT8 else BLOCK_D
    # The last rows of a chunk see most tokens and begin first.
    kv_head, number = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    entry, first = find_rows(chunks, count, number, ROWS)
    first_row, num_rows, start = tl.load(entry), tl.load(entry + 1), tl.load(entry + 3)
    table = tables + tl.load(entry + 2).to(tl.int64) * table_stride
    zero = tl.load(entry, volatile=True) - first_row  # which the compiler cannot know
    if first >= 0 and first < num_rows:
        offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        head, of_chunk, real = _heads_and_rows(offs_m, kv_head, first, num_rows, GROUP, BLOCK_M)
        row, position = first_row.to(tl.int64) + of_chunk, start + of_chunk
        length = start + num_rows
        # The tokens that each row sees, and those that all see.
        seen_from = tl.maximum(position - WINDOW + 1, 0) if WINDOW else tl.zeros_like(position)
        if CAUSAL:
            seen_to = position + 1
        elif WINDOW:
            seen_to = tl.minimum(position + WINDOW, length)
        else:
            seen_to = tl.zeros_like(position) + length
        if HAS_SPANS:
            seen_to = tl.maximum(seen_to, tl.minimum(tl.load(span_ends_T + row), length))
        begin, end = tl.min(seen_from, axis=0), tl.max(seen_to, axis=0)
        all_from, all_to = tl.max(seen_from, axis=0), tl.min(seen_to, axis=0)
        offs_n = tl.arange(0, BLOCK_N)
        token = tl.minimum(begin + offs_n, end - 1).to(tl.uint32)
        block = tl.load(table + token // BLOCK_SIZE)
        q_mask = real[:, None] & (offs_d < HEAD_DIM)[None, :]
        q_offs = (row * q_row + head)[:, None] * HEAD_DIM + offs_d[None, :]
        q = tl.load(q_THD + q_offs, mask=q_mask, other=0.0)
        if (CONVERTS_FP8 or IS_INT8) and q.dtype == tl.bfloat16:
            q, largest = half_queries(q)
            scales = scale * largest
        else:
            scales = tl.zeros([BLOCK_M], tl.float32) + scale
        m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        acc_scale = 1e-30
        first_slot = kv_head.to(tl.int64) * slots
        key_scales_KN += first_slot
        value_scales_KN += first_slot
        offs_w = tl.arange(0, BLOCK_W)
        k_ptrs = (keys_KND + first_slot * KV_WIDTH) + offs_w[None, :]
        v_ptrs = (values_KND + first_slot * KV_WIDTH) + offs_w[None, :]
        kv_mask = (offs_w < KV_WIDTH)[None, :]
        for tile in range(begin, end, BLOCK_N):
            token = tl.minimum(tile + offs_n, end - 1).to(tl.uint32)
            slot = (block * BLOCK_SIZE + token % BLOCK_SIZE).to(tl.int64)
            place = (slot * KV_WIDTH)[:, None]
            k = tl.load(k_ptrs + place, mask=kv_mask, other=0)
            v = tl.load(v_ptrs + place, mask=kv_mask, other=0)
            # Blocks are looked up one iteration before their tokens are copied.
            token = tl.minimum(tile + BLOCK_N + offs_n, end - 1).to(tl.uint32)
            block = tl.load(table + token // BLOCK_SIZE)
            if CONVERTS_FP8:
                k = k.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(q.dtype)
                v = v.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(q.dtype)
            elif IS_FP8:
                k = widened(k).to(q.dtype)
                v = widened(v).to(q.dtype)
            elif IS_INT8:
                k = from_int8(k).to(q.dtype)
                v = from_int8(v).to(q.dtype)
            qk = tl.dot(q, tl.trans(k), input_precision="ieee")
            if IS_INT8:
                # Gathers keep Triton from looking up each scale in all threads that need it.
                qk = qk * tl.gather(tl.load(key_scales_KN + slot), offs_n, 0)[None, :]
            if HAS_CAP:
                qk = cap - 2 * cap / (tl.exp2(qk * scales[:, None]) + 1)
            if tile < all_from or tile + BLOCK_N > all_to:
                seen = offs_n[None, :] < (seen_to - tile)[:, None]
                if WINDOW:
                    seen = seen & (offs_n[None, :] >= (seen_from - tile)[:, None])
                qk = tl.where(seen, qk, float("-inf"))
            if HAS_CAP:
                m_new = tl.maximum(m_i, tl.max(qk, axis=1))
                p = tl.exp2(qk - m_new[:, None])
            else:
                m_new = tl.maximum(m_i, tl.max(qk, axis=1) * scales)
                p = tl.exp2(qk * scales[:, None] - m_new[:, None])
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, axis=1)
            if IS_INT8:
                # Sums are relative to the largest scale up to here, so that products fit fp16.
                scale_v = tl.load(value_scales_KN + slot)
                new_scale = tl.maximum(acc_scale, tl.max(scale_v, axis=0))
                p = p * tl.gather(scale_v * (FP16_SHARE / new_scale), offs_n, 0)[None, :]
                alpha = alpha * (acc_scale / new_scale)
                acc_scale = new_scale
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
            m_i = m_new
        # Places of rows are computed once more, since they would take registers of the loop.
        offs_m += zero
        head, of_chunk, real = _heads_and_rows(offs_m, kv_head, first, num_rows, GROUP, BLOCK_M)
        row = first_row.to(tl.int64) + of_chunk
        if HAS_SINKS:
            sink = tl.load(sinks_H + head) * LOG2_E
            m_new = tl.maximum(m_i, sink)
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.exp2(sink - m_new)
            acc = acc * alpha[:, None]
        if IS_INT8:
            value_scale = acc_scale / FP16_SHARE
        out = acc / l_i[:, None] * value_scale
        q_mask = real[:, None] & (offs_d < HEAD_DIM)[None, :]
        out_offs = (row * out_row + head)[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(out_THD + out_offs, out.to(out_THD.dtype.element_ty), mask=q_mask)
