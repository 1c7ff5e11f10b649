"""Triton decode attention over the paged cache, all decoding rows of a step in one launch.

    q [T, H, D]   keys, values [K, N, D]   ->   out [T, H, D], whose decoding rows are filled

The tokens of each row are split, and the GPU lists the splits of all rows, the longest first. A few
programs for each of its processors take turns with the pairs of a split and a KV head, and attend
for all query heads that share it. The result of a row with one split is written to ``out``; of
other rows, whichever program finishes a KV head's last split combines all of them, in their order.
How a row is split depends only on its own length, so its result is the same in any batch.

Scores and sums have tokens and dimensions as rows, and heads as columns: tensor cores multiply 16
rows by as few as 8 columns.

Lengths and block tables are read on the GPU only; grids and workspaces depend on the number of
rows, the heads and the GPU. So a CUDA graph of the launches can be replayed with other lengths and
tables. Rows of length 0 are padding.

Scores, sums and partial results are fp32; products are in the cache's dtype, or in q's if the cache
has one byte a value. GPUs that convert fp8 do so to fp16, which is exact, and multiply in fp16. A
scale of all keys or all values is applied to the scores or the results. A sink is one more score of
its head in a row's first split.

T rows of a step, R decoding rows, H query heads, K KV heads, G = H / K, D head dimension, N slots
of the cache, S most splits of a row, L = R * S. Strides are counted in heads, so that Triton
compiles one kernel for all strides and knows that they are multiples of D.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..attention_metadata import AttentionParams, DecodeMetadata
from ..fp8 import FP8
from ..scaled import INT8, CachedKV
from . import split_rule
from .cached_kv import (
    LOG2_E,
    converts_fp8,
    factors,
    from_fp8,
    from_int8,
    half_queries,
    parts,
    whole_scale,
    widened,
)
from .launch import cached_for_gpu, direct, next_power_of_2
from .row_splits import list_constants, list_entry, split_list

# About as many tokens as a split has. Fewer mean more splits to combine; more leave a GPU idle in
# small batches.
MIN_SPLIT = 256
# Warps of all programs of a processor, as many as its registers hold at once. Where shared memory
# holds fewer programs, the others begin as those end.
_WARPS = 12
# The most splits that are combined at a time, and their numbers for each warp, which are on their
# way into registers together.
_BLOCK_S = 16
_WARP_COMBINED = 2 << 10
# The fewest rows and columns of tensor cores' products. float32 is multiplied without tensor cores.
_MIN_DOT = 16
_MIN_HEADS = 8
# Dimensions for which a program has a warp. Warps often wait for each other, so that programs have
# few; of two, all GPUs take products alike. Large groups have more, so that a thread has at most 32
# of the sums of all heads and dimensions.
_WARP_DIMS = 64
_MIN_WARPS = 2
_WARP_SUMS = 32 * 32
# The most tokens of a block, and bytes of its keys, for each of those warps and in all, in the
# dtype of the product: two blocks of keys and of values fit every GPU's shared memory. float32 keys
# of 512 dimensions take more, since products have at least 16 tokens.
_BLOCK_N = 64
_WARP_BYTES = 4 << 10
_BLOCK_BYTES = 16 << 10
# Registers of a processor, and the most that a thread may have.
_REGISTERS, _MAX_REGISTERS = 64 << 10, 168
# Multiprocessors of an H100, for devices that torch does not ask.
_H100_PROCESSORS = 132


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return _H100_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


class Constants(NamedTuple):
    """Compile-time constants and options of the kernels."""

    list_splits: dict[str, Any]
    attend: dict[str, Any]


@cached_for_gpu
def constants(
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    params: AttentionParams,
    block_size: int,
    processors: int,
) -> Constants:
    """The constants for one kind of attention on a GPU."""
    max_splits = split_rule.max_splits(split_rule.ROW_PROGRAMS * processors, kv_heads)
    if params.window is not None:
        max_splits = max(1, min(max_splits, (params.window + MIN_SPLIT // 2) // MIN_SPLIT))
    block_d = max(_MIN_DOT, next_power_of_2(dim))
    group, min_heads = heads // kv_heads, 1 if q_dtype == torch.float32 else _MIN_HEADS
    block_g, block_s = next_power_of_2(group), next_power_of_2(max_splits)
    block_h, token_bytes = max(min_heads, block_g), block_d * q_dtype.itemsize
    warps = max(_MIN_WARPS, block_d // _WARP_DIMS)
    block_bytes = min(warps * _WARP_BYTES, _BLOCK_BYTES)
    block_n = max(_MIN_DOT, min(_BLOCK_N, block_bytes // token_bytes))
    warps = max(warps, block_d * block_h // _WARP_SUMS)
    attend = {
        "MAX_SPLITS": max_splits,
        "HAS_CAP": params.soft_cap is not None,
        "HAS_SINKS": params.sinks,
        "BLOCK_SIZE": block_size,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "BLOCK_H": block_h,
        "HEAD_DIM": dim,
        "BLOCK_D": block_d,
        "BLOCK_N": block_n,
        "BLOCK_G": block_g,
        "BLOCK_S": max(1, min(_BLOCK_S, block_s, warps * _WARP_COMBINED // (block_g * block_d))),
        "num_warps": warps,
        # One block is computed while two are read, if they fit.
        "num_stages": 3 if block_n * token_bytes <= _BLOCK_BYTES else 2,
        "maxnreg": min(_MAX_REGISTERS, _REGISTERS // (32 * warps)),
        "IS_FP8": cache_dtype == FP8,
        "CONVERTS_FP8": cache_dtype == FP8 and converts_fp8(),
        "IS_INT8": cache_dtype == INT8,
    }
    splits = list_constants(params.window, MIN_SPLIT, max_splits, kv_heads)
    return Constants(splits, attend)


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
    kv_heads = keys.shape[0]
    assert keys.shape == values.shape and keys.is_contiguous() and values.is_contiguous()
    assert keys.shape[2] == dim and heads % kv_heads == 0, (q_THD.shape, keys.shape)
    assert key_scales.is_contiguous() and value_scales.is_contiguous()
    q_THD = q_THD if keys_KND.dtype.itemsize == 1 else q_THD.to(keys_KND.dtype)
    assert out_THD.shape == q_THD.shape
    for each in (q_THD, out_THD):
        assert each.stride()[1:] == (dim, 1) and each.stride(0) % dim == 0, each.stride()
    num_rows, num_processors = decodes.rows.shape[0], processors(q_THD.device)
    fixed = constants(
        q_THD.dtype,
        keys_KND.dtype,
        heads,
        kv_heads,
        dim,
        params,
        decodes.block_size,
        num_processors,
    )
    if fixed.attend["CONVERTS_FP8"] or fixed.attend["IS_INT8"]:  # read in words
        keys, values = keys.view(torch.int32), values.view(torch.int32)
    max_splits = fixed.attend["MAX_SPLITS"]
    splits, num_work, finished = split_list(decodes, fixed.list_splits)
    partials = num_rows * max_splits if max_splits > 1 else 0
    partial_LHD = q_THD.new_empty(partials, heads, dim, dtype=torch.float32)
    lse_LH = q_THD.new_empty(partials, heads, dtype=torch.float32)
    programs = max(1, _WARPS // fixed.attend["num_warps"]) * num_processors
    _attend[(min(len(splits) * kv_heads, programs),)](
        q_THD,
        keys,
        values,
        key_scales,
        value_scales,
        lse_LH if sinks_H is None else sinks_H,
        decodes.tables,
        splits,
        num_work,
        finished,
        partial_LHD,
        lse_LH,
        out_THD,
        *factors(params, whole_scale(keys_KND)),
        whole_scale(values_KND),
        decodes.tables.stride(0),
        q_THD.stride(0) // dim,
        out_THD.stride(0) // dim,
        keys.shape[1],
        **fixed.attend,
    )


@triton.jit
def _blocks(blocks: tl.tensor, token: tl.tensor, end: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """The cache's blocks that have the tokens of a row."""
    return tl.load(blocks + token.to(tl.uint32) // SIZE, mask=token < end, other=0)


@direct
@triton.jit(do_not_specialize=["table_stride", "q_row", "out_row", "slots"])
def _attend(
    q_THD: tl.tensor,
    keys_KND: tl.tensor,
    values_KND: tl.tensor,
    key_scales_KN: tl.tensor,
    value_scales_KN: tl.tensor,
    sinks_H: tl.tensor,
    tables: tl.tensor,
    splits_L6: tl.tensor,
    num_work: tl.tensor,
    finished_RK: tl.tensor,
    partial_LHD: tl.tensor,
    lse_LH: tl.tensor,
    out_THD: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    out_scale: tl.tensor,
    table_stride: tl.tensor,
    q_row: tl.tensor,
    out_row: tl.tensor,
    slots: tl.tensor,
    MAX_SPLITS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    IS_FP8: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
    IS_INT8: tl.constexpr,
) -> None:
    """Attend to the splits whose turn it is, each for the query heads of one KV head."""
    IN_WORDS: tl.constexpr = CONVERTS_FP8 or IS_INT8
    WIDTH: tl.constexpr = HEAD_DIM // 4 if IN_WORDS else HEAD_DIM
    offs_h, offs_d, offs_n = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    offs_w = tl.arange(0, BLOCK_D // 4 if IN_WORDS else BLOCK_D)
    head_mask = offs_h < GROUP
    q_mask = head_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    end_work, step = tl.load(num_work) * KV_HEADS, tl.num_programs(0)
    # Entries are read a turn ahead.
    entry = list_entry(splits_L6, tl.program_id(0) // KV_HEADS)
    for work in range(tl.program_id(0), end_work, step):
        kv_head = work % KV_HEADS
        row, table, begin, end, num_splits, place = entry
        blocks = tables + table.to(tl.int64) * table_stride
        block = _blocks(blocks, begin + offs_n, end, BLOCK_SIZE)
        head = kv_head * GROUP + offs_h
        q_offs = (row.to(tl.int64) * q_row + head[:, None]) * HEAD_DIM + offs_d[None, :]
        q = tl.load(q_THD + q_offs, mask=q_mask, other=0.0)
        out_HD = out_THD + row.to(tl.int64) * out_row * HEAD_DIM
        is_first = place % MAX_SPLITS == 0
        is_only = (num_splits == 1) if MAX_SPLITS > 1 else True
        if IN_WORDS and q.dtype == tl.bfloat16:
            q, largest = half_queries(q)
            scales = (scale * largest)[None, :]
        else:
            scales = scale
        q = tl.trans(q)
        m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks_H + head, mask=head_mask, other=0.0) * LOG2_E
            m_i = tl.where(is_first, sink, m_i)
        # Summed over the tokens of a block behind the loop, which takes warps a wait.
        l_NH = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
        first_slot = slots.to(tl.int64) * kv_head
        keys_ND, values_ND = keys_KND + first_slot * WIDTH, values_KND + first_slot * WIDTH
        for tile in range(begin, end, BLOCK_N):
            token = tile + offs_n
            inside = token < end
            slot = block.to(tl.uint32) * BLOCK_SIZE + token.to(tl.uint32) % BLOCK_SIZE
            slot = slot.to(tl.int64)
            # Read a turn ahead, so that copies of keys and values need not wait.
            block = _blocks(blocks, token + BLOCK_N, end, BLOCK_SIZE)
            offs = slot[:, None] * WIDTH + offs_w[None, :]
            there = inside[:, None] & (offs_w < WIDTH)[None, :]
            k = tl.load(keys_ND + offs, mask=there, other=0)
            if CONVERTS_FP8:
                k = from_fp8(k).to(q.dtype)
                v = tl.trans(from_fp8(tl.load(values_ND + offs, mask=there, other=0)).to(q.dtype))
            elif IS_INT8:
                k = from_int8(k).to(q.dtype)
                v = tl.trans(from_int8(tl.load(values_ND + offs, mask=there, other=0)).to(q.dtype))
            else:
                v = tl.load(values_ND + tl.trans(offs), mask=tl.trans(there), other=0)
                if IS_FP8:
                    k, v = widened(k).to(q.dtype), widened(v).to(q.dtype)
            qk = tl.dot(k, q, input_precision="ieee") * scales
            if IS_INT8:
                key_scale = tl.load(key_scales_KN + first_slot + slot, mask=inside, other=0.0)
                qk = qk * key_scale[:, None]
            if HAS_CAP:
                qk = cap - 2 * cap / (tl.exp2(qk) + 1)
            qk = tl.where(inside[:, None], qk, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(qk, axis=0))
            p = tl.exp2(qk - m_new[None, :])
            alpha = tl.exp2(m_i - m_new)
            l_NH = l_NH * alpha[None, :] + p
            acc = acc * alpha[None, :]
            if IS_INT8:
                # Relative to the block's largest scale, so that the products fit fp16.
                value_scale = tl.load(value_scales_KN + first_slot + slot, mask=inside, other=0.0)
                block_scale = tl.maximum(tl.max(value_scale, axis=0), 1e-30)
                p = p * (value_scale * (1 / block_scale))[:, None]
                acc += tl.dot(v, p.to(v.dtype), input_precision="ieee") * block_scale
            else:
                acc += tl.dot(v, p.to(v.dtype), input_precision="ieee")
            m_i = m_new
        l_i = tl.sum(l_NH, axis=0)
        if HAS_SINKS:
            l_i += tl.exp2(tl.where(is_first, sink - m_i, float("-inf")))
        value = tl.trans(acc / l_i[None, :] * out_scale)
        entry = list_entry(splits_L6, tl.minimum(work + step, end_work - 1) // KV_HEADS)
        if is_only:
            offs = head[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(out_HD + offs, value.to(out_THD.dtype.element_ty), mask=q_mask)
        else:
            at = place.to(tl.int64) * (KV_HEADS * GROUP) + head
            tl.store(lse_LH + at, m_i + tl.log2(l_i), mask=head_mask)
            tl.store(partial_LHD + at[:, None] * HEAD_DIM + offs_d[None, :], value, mask=q_mask)
            tl.debug_barrier()  # all threads have stored what the count releases
            number = place // MAX_SPLITS  # of the row
            counter = finished_RK + number * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
                tl.store(counter, 0)  # for the next layer
                _combine(
                    partial_LHD + number.to(tl.int64) * (MAX_SPLITS * KV_HEADS * GROUP * HEAD_DIM),
                    lse_LH + number.to(tl.int64) * (MAX_SPLITS * KV_HEADS * GROUP),
                    out_HD,
                    kv_head * GROUP,
                    num_splits,
                    KV_HEADS * GROUP,
                    GROUP,
                    BLOCK_G,
                    HEAD_DIM,
                    BLOCK_D,
                    BLOCK_S,
                )


@triton.jit
def _combine(
    partial_SHD: tl.tensor,
    lse_SH: tl.tensor,
    out_HD: tl.tensor,
    first_head: tl.tensor,
    num_splits: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Combine the splits of some heads of one row, by their log-sum-exps. They are read past the
    first-level cache, which may have older ones."""
    offs_g, offs_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    mask = (offs_g < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    # The heads of padding read those of the last one.
    head = first_head + tl.minimum(offs_g, GROUP - 1)
    offs = head[:, None] * HEAD_DIM + offs_d[None, :]
    m_i = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for begin in range(0, num_splits, BLOCK_S):
        split = begin + tl.arange(0, BLOCK_S)
        is_split = split < num_splits
        lse = tl.load(
            lse_SH + split[:, None] * HEADS + head[None, :],
            mask=is_split[:, None],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        values = tl.load(
            partial_SHD + (split * (HEADS * HEAD_DIM))[:, None, None] + offs[None, :, :],
            mask=is_split[:, None, None] & mask[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        m_new = tl.maximum(m_i, tl.max(lse, axis=0))
        p = tl.exp2(lse - m_new[None, :])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=0)
        acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * values, axis=0)
        m_i = m_new
    value = acc / l_i[:, None]
    tl.store(out_HD + offs, value.to(out_HD.dtype.element_ty), mask=mask)
