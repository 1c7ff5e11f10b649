"""Triton decode attention over the paged cache, all decoding rows of a step in one launch.

    q [T, H, D]   keys, values [K, N, D]   ->   out [T, H, D], whose decoding rows are filled

A program attends to one split of the tokens of one sequence and one KV head, for all query heads
that share it; a second kernel combines the splits. A sequence's splits depend only on its own
length, so a row's result is the same in any batch. Scores, sums and partial results are fp32;
products are in the cache's dtype, or in q's if the cache has one byte a value. GPUs that convert
fp8 do so to fp16, which is exact, and multiply in fp16. A scale of all keys or all values is
applied to the scores or the results. A sink acts like one more split of its head, without values.

T rows of a step, R decoding rows, H query heads, K KV heads, G = H / K, D head dimension, N slots
of the cache, S splits. Strides are counted in heads, so that Triton compiles one kernel for all
strides and knows that they are multiples of D.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..attention_metadata import AttentionParams, DecodeMetadata
from ..fp8 import FP8
from ..scaled import INT8, CachedKV
from .cached_kv import LOG2_E, converts_fp8, factors, from_int8, parts, whole_scale, widened

# Tokens of a split, or more if a sequence would then have over MAX_SPLITS, which take memory. Fewer
# tokens mean more splits to combine; more leave a GPU idle in small batches.
SPLIT = 512
MAX_SPLITS = 64
# Splits that are combined at a time.
_BLOCK_S = 16
# The fewest rows or columns of a tensor core's product. float32 is multiplied without tensor cores.
_MIN_DOT = 16
# Tokens of a block, and bytes of its keys in the dtype of the product: two stages of keys and
# values fit every GPU's shared memory. float32 needs registers for them.
_BLOCK_N = 64
_BLOCK_N_INT8 = 128
_BLOCK_BYTES = {2: 16 << 10, 4: 8 << 10}
# Options of compilation.
ATTEND_OPTIONS = {"num_warps": 4, "num_stages": 2}
COMBINE_OPTIONS = {"num_warps": 4}


def constants(
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    params: AttentionParams,
    block_size: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile-time constants of ``_attend`` and ``_combine``."""
    block_d = max(_MIN_DOT, triton.next_power_of_2(dim))
    group, min_rows = heads // kv_heads, 1 if q_dtype == torch.float32 else _MIN_DOT
    max_tokens = _BLOCK_N_INT8 if cache_dtype == INT8 else _BLOCK_N
    shape = {
        "WINDOW": params.window or 0,
        "MIN_SPLIT": SPLIT,
        "MAX_SPLITS": MAX_SPLITS,
        "HEAD_DIM": dim,
        "BLOCK_D": block_d,
    }
    attend = {
        "HAS_CAP": params.soft_cap is not None,
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "BLOCK_H": max(min_rows, triton.next_power_of_2(group)),
        "BLOCK_N": max(
            _MIN_DOT,
            min(max_tokens, _BLOCK_BYTES[q_dtype.itemsize] // (block_d * q_dtype.itemsize)),
        ),
        "IS_FP8": cache_dtype == FP8,
        "CONVERTS_FP8": cache_dtype == FP8 and converts_fp8(),
        "IS_INT8": cache_dtype == INT8,
    }
    return shape | attend, shape | {"BLOCK_S": _BLOCK_S, "HAS_SINKS": params.sinks}


def paged_decode(
    q_THD: torch.Tensor,
    keys_KND: CachedKV,
    values_KND: CachedKV,
    decodes: DecodeMetadata,
    params: AttentionParams,
    out_THD: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Fill the decoding rows of ``out``. ``sinks`` are fp32 scores, if ``params`` has them."""
    assert params.sinks == (sinks_H is not None)
    assert sinks_H is None or (sinks_H.dtype == torch.float32 and sinks_H.is_contiguous())
    keys, key_scales = parts(keys_KND)
    values, value_scales = parts(values_KND)
    heads, dim = q_THD.shape[1:]
    kv_heads, window = keys.shape[0], params.window
    assert keys.shape == values.shape and keys.is_contiguous() and values.is_contiguous()
    assert keys.shape[2] == dim and heads % kv_heads == 0, (q_THD.shape, keys.shape)
    assert key_scales.is_contiguous() and value_scales.is_contiguous()
    if keys.dtype == INT8:  # read in words
        keys, values = keys.view(torch.int32), values.view(torch.int32)
    q_THD = q_THD if keys_KND.dtype.itemsize == 1 else q_THD.to(keys_KND.dtype)
    assert (
        out_THD.shape == q_THD.shape and decodes.rows.dtype == decodes.tables.dtype == torch.int32
    )
    for each in (q_THD, out_THD):
        assert each.stride()[1:] == (dim, 1) and each.stride(0) % dim == 0, each.stride()
    count, max_visible = decodes.rows.shape[0], decodes.max_seq_len
    max_visible = min(max_visible, window or max_visible)
    num_splits = min(MAX_SPLITS, triton.cdiv(max_visible, SPLIT))
    partial = q_THD.new_empty(count, heads, num_splits, dim, dtype=torch.float32)
    lse = q_THD.new_empty(count, heads, num_splits, dtype=torch.float32)
    attend, combine = constants(
        q_THD.dtype, keys_KND.dtype, heads, kv_heads, dim, params, decodes.block_size
    )
    _attend[(count, kv_heads, num_splits)](
        q_THD,
        keys,
        values,
        key_scales,
        value_scales,
        decodes.rows,
        decodes.tables,
        partial,
        lse,
        *factors(params, whole_scale(keys_KND)),
        num_splits,
        decodes.tables.stride(0),
        q_THD.stride(0) // dim,
        keys.shape[1],
        **attend,
        **ATTEND_OPTIONS,
    )
    _combine[(count, heads)](
        partial,
        lse,
        decodes.rows,
        lse if sinks_H is None else sinks_H,
        out_THD,
        num_splits,
        out_THD.stride(0) // dim,
        whole_scale(values_KND),
        **combine,
        **COMBINE_OPTIONS,
    )


@triton.jit
def _size(visible: tl.tensor, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr) -> tl.tensor:
    """Tokens of a split, for a sequence with ``visible`` tokens."""
    return tl.maximum(tl.cdiv(visible, MAX_SPLITS), MIN_SPLIT)


@triton.jit(do_not_specialize=["num_splits", "table_stride", "q_row", "slots"])
def _attend(
    q_THD: tl.tensor,
    keys_KND: tl.tensor,
    values_KND: tl.tensor,
    key_scales_KN: tl.tensor,
    value_scales_KN: tl.tensor,
    rows: tl.tensor,
    tables: tl.tensor,
    partial_RHSD: tl.tensor,
    lse_RHS: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    num_splits: tl.tensor,
    table_stride: tl.tensor,
    q_row: tl.tensor,
    slots: tl.tensor,
    WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_FP8: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
    IS_INT8: tl.constexpr,
) -> None:
    """Attend to one split of one sequence, for the query heads of one KV head."""
    number, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = rows + number * 3
    row, length = tl.load(entry).to(tl.int64), tl.load(entry + 2)
    table = tables + tl.load(entry + 1).to(tl.int64) * table_stride
    first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    size = _size(length - first, MIN_SPLIT, MAX_SPLITS)
    begin = first + split * size
    end = tl.minimum(begin + size, length)
    if begin < length:
        offs_h, offs_d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
        head = kv_head * GROUP + offs_h
        q_mask = (offs_h < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
        q_offs = (row * q_row + head[:, None]) * HEAD_DIM + offs_d[None, :]
        q = tl.load(q_THD + q_offs, mask=q_mask, other=0.0)
        if (CONVERTS_FP8 or IS_INT8) and q.dtype == tl.bfloat16:
            # fp16 has a smaller range than bfloat16, so each head is divided by its largest value.
            wide = q.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30)
            q = (wide / largest[:, None]).to(tl.float16)
            scales = scale * largest[:, None]
        else:
            scales = scale
        m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        first_slot = kv_head.to(tl.int64) * slots
        for tile in range(begin, end, BLOCK_N):
            token = tile + tl.arange(0, BLOCK_N)
            inside = token < end
            block = tl.load(table + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = first_slot + block * BLOCK_SIZE + token % BLOCK_SIZE
            if IS_INT8:  # in words of four
                place = slot[:, None] * (HEAD_DIM // 4) + tl.arange(0, BLOCK_D // 4)[None, :]
                there = inside[:, None] & (tl.arange(0, BLOCK_D // 4) < HEAD_DIM // 4)[None, :]
            else:
                place = slot[:, None] * HEAD_DIM + offs_d[None, :]
                there = inside[:, None] & (offs_d < HEAD_DIM)[None, :]
            k = tl.load(keys_KND + place, mask=there, other=0)
            v = tl.load(values_KND + place, mask=there, other=0)
            if CONVERTS_FP8:
                k = k.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(q.dtype)
                v = v.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(q.dtype)
            elif IS_FP8:
                k = widened(k).to(q.dtype)
                v = widened(v).to(q.dtype)
            elif IS_INT8:
                k = from_int8(k).to(q.dtype)
                v = from_int8(v).to(q.dtype)
            qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scales
            if IS_INT8:
                key_scale = tl.load(key_scales_KN + slot, mask=inside, other=0.0)
                qk = qk * key_scale[None, :]
            if HAS_CAP:
                qk = cap - 2 * cap / (tl.exp2(qk) + 1)
            qk = tl.where(inside[None, :], qk, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(qk, axis=1))
            p = tl.exp2(qk - m_new[:, None])
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, axis=1)
            acc = acc * alpha[:, None]
            if IS_INT8:
                # Relative to the block's largest scale, so that the products fit fp16.
                value_scale = tl.load(value_scales_KN + slot, mask=inside, other=0.0)
                widest = tl.maximum(tl.max(value_scale, axis=0), 1e-30)
                p = p * (value_scale / widest)[None, :]
                product = tl.dot(p.to(v.dtype), v, input_precision="ieee")
                acc += product * widest
            else:
                acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
            m_i = m_new
        at = (number.to(tl.int64) * tl.num_programs(1) * GROUP + head) * num_splits + split
        head_mask = offs_h < GROUP
        tl.store(lse_RHS + at, m_i + tl.log2(l_i), mask=head_mask)
        place = partial_RHSD + at[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(place, acc / l_i[:, None], mask=q_mask)


@triton.jit(do_not_specialize=["num_splits", "out_row"])
def _combine(
    partial_RHSD: tl.tensor,
    lse_RHS: tl.tensor,
    rows: tl.tensor,
    sinks_H: tl.tensor,
    out_THD: tl.tensor,
    num_splits: tl.tensor,
    out_row: tl.tensor,
    value_scale: tl.tensor,
    WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Combine the splits of one head of one sequence, by their log-sum-exps."""
    number, head = tl.program_id(0), tl.program_id(1)
    entry = rows + number * 3
    row, length = tl.load(entry).to(tl.int64), tl.load(entry + 2)
    visible = tl.minimum(length, WINDOW) if WINDOW else length
    count = tl.cdiv(visible, _size(visible, MIN_SPLIT, MAX_SPLITS))
    at = (number.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    offs_d = tl.arange(0, BLOCK_D)
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(0, count, BLOCK_S):
        split = begin + tl.arange(0, BLOCK_S)
        lse = tl.load(lse_RHS + at + split, mask=split < count, other=float("-inf"))
        there = (split < count)[:, None] & (offs_d < HEAD_DIM)[None, :]
        place = partial_RHSD + (at + split)[:, None] * HEAD_DIM + offs_d[None, :]
        values = tl.load(place, mask=there, other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse, axis=0))
        p = tl.exp2(lse - m_new)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=0)
        acc = acc * alpha + tl.sum(p[:, None] * values, axis=0)
        m_i = m_new
    if HAS_SINKS:
        sink = tl.load(sinks_H + head) * LOG2_E
        m_new = tl.maximum(m_i, sink)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.exp2(sink - m_new)
        acc = acc * alpha
    place = out_THD + (row * out_row + head) * HEAD_DIM + offs_d
    tl.store(place, (acc / l_i * value_scale).to(out_THD.dtype.element_ty), mask=offs_d < HEAD_DIM)
