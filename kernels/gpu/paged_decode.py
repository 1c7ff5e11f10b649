"""Triton decode attention over the paged cache, all decoding rows of a step in one launch.

    q [T, H, D]   keys, values [K, N, D]   ->   out [T, H, D], whose decoding rows are filled

The tokens of each row are split, and the GPU lists the splits of all rows, the longest first. A few
programs for each of its processors take turns with the pairs of a split and a KV head, and attend
for all query heads that share it. The result of a row with one split is written to ``out``; the
splits of other rows are combined by a second kernel. How a row is split depends only on its own
length, so its result is the same in any batch.

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
from .cached_kv import (
    LOG2_E,
    converts_fp8,
    factors,
    from_fp8,
    from_int8,
    parts,
    whole_scale,
    widened,
)
from .launch import cached_for_gpu, cdiv, direct, next_power_of_2

# The fewest tokens of a split. Fewer mean more splits to combine; more leave a GPU idle in small
# batches. Longer splits have a multiple of _SPLIT_UNIT, as most kinds of attention read at a time.
MIN_SPLIT = 128
_SPLIT_UNIT = tl.constexpr(64)
# The most splits of a row: enough programs for each processor if it is alone, unless that takes too
# much memory.
_ROW_PROGRAMS = 2
MAX_SPLITS = 64
# Programs of a processor, as many as its registers and shared memory hold at once.
_PROGRAMS = 3
# Splits that are combined at a time.
_BLOCK_S = 16
# Rows that a program lists, and others with which it compares them at a time.
_BLOCK_R = 8
_BLOCK_OTHERS = 256
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
# Multiprocessors of an H100, for devices that torch does not ask.
_H100_PROCESSORS = 132


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return _H100_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


class Constants(NamedTuple):
    """Compile-time constants of the kernels."""

    list_splits: dict[str, Any]
    attend: dict[str, Any]
    combine: dict[str, Any]


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
    max_splits = min(MAX_SPLITS, cdiv(_ROW_PROGRAMS * processors, kv_heads))
    if params.window is not None:
        max_splits = max(1, min(max_splits, (params.window + MIN_SPLIT // 2) // MIN_SPLIT))
    block_d = max(_MIN_DOT, next_power_of_2(dim))
    group, min_rows = heads // kv_heads, 1 if q_dtype == torch.float32 else _MIN_DOT
    max_tokens = _BLOCK_N_INT8 if cache_dtype == INT8 else _BLOCK_N
    splits = {
        "WINDOW": params.window or 0,
        "MIN_SPLIT": MIN_SPLIT,
        "MAX_SPLITS": max_splits,
    }
    shape = {"HEAD_DIM": dim, "BLOCK_D": block_d}
    attend = {
        "MAX_SPLITS": max_splits,
        "HAS_CAP": params.soft_cap is not None,
        "HAS_SINKS": params.sinks,
        "BLOCK_SIZE": block_size,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "BLOCK_H": max(min_rows, next_power_of_2(group)),
        "BLOCK_N": max(
            _MIN_DOT,
            min(max_tokens, _BLOCK_BYTES[q_dtype.itemsize] // (block_d * q_dtype.itemsize)),
        ),
        "IS_FP8": cache_dtype == FP8,
        "CONVERTS_FP8": cache_dtype == FP8 and converts_fp8(),
        "IS_INT8": cache_dtype == INT8,
    }
    block_s = next_power_of_2(max_splits)
    return Constants(
        splits | {"BLOCK_R": _BLOCK_R, "BLOCK_OTHERS": _BLOCK_OTHERS, "BLOCK_S": block_s},
        shape | attend,
        shape | splits | {"BLOCK_S": min(_BLOCK_S, block_s)},
    )


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
    count, num_processors = decodes.rows.shape[0], processors(q_THD.device)
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
    splits, num_splits = split_list(decodes, fixed.list_splits)
    several = count * max_splits if max_splits > 1 else 0
    partial_LHD = q_THD.new_empty(several, heads, dim, dtype=torch.float32)
    lse_LH = q_THD.new_empty(several, heads, dtype=torch.float32)
    _attend[(min(len(splits) * kv_heads, _PROGRAMS * num_processors),)](
        q_THD,
        keys,
        values,
        key_scales,
        value_scales,
        lse_LH if sinks_H is None else sinks_H,
        decodes.tables,
        splits,
        num_splits,
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
        **ATTEND_OPTIONS,
    )
    if several:
        _combine[(count, heads)](
            partial_LHD,
            lse_LH,
            decodes.rows,
            out_THD,
            out_THD.stride(0) // dim,
            **fixed.combine,
            **COMBINE_OPTIONS,
        )


def split_list(
    decodes: DecodeMetadata, constants: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The splits of all rows, int32 [L, 5], and their number, int32 [1]; the rest is undefined.

    A split has its row in the step, the row of its block table, its first token, its end, and its
    place among the partial results: -1 if it is its row's only one. All layers of a step with the
    same constants share one list.
    """
    key = ("splits", *constants.values())
    if key not in decodes.derived:
        rows = decodes.rows
        assert rows.dtype == decodes.tables.dtype == torch.int32
        assert rows.is_contiguous() and decodes.tables.stride(1) == 1
        splits = rows.new_empty(len(rows) * constants["MAX_SPLITS"], 5)
        number = rows.new_empty(1)
        grid = (cdiv(len(rows), constants["BLOCK_R"]),)
        _list_splits[grid](rows, splits, number, len(rows), **constants)
        decodes.derived[key] = splits, number
    splits, number = decodes.derived[key]
    return splits, number


@triton.jit
def _visible(length: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """The tokens to which a row attends."""
    return tl.minimum(length, WINDOW) if WINDOW else length


@triton.jit
def _split(
    visible: tl.tensor, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The number of splits of so many tokens, and the tokens of each. The last one also has what
    remains, if that is less than half as many."""
    size = tl.cdiv(tl.cdiv(visible, MAX_SPLITS), _SPLIT_UNIT) * _SPLIT_UNIT
    size = tl.maximum(size, MIN_SPLIT)
    return tl.maximum((visible + size // 2) // size, tl.minimum(visible, 1)), size


@direct
@triton.jit(do_not_specialize=["num_rows"])
def _list_splits(
    rows: tl.tensor,
    splits_L5: tl.tensor,
    num_splits: tl.tensor,
    num_rows: tl.tensor,
    WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """List the splits of some rows, each one's behind those of all rows with longer ones."""
    number = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row, entry = number < num_rows, rows + number * 3
    length = tl.load(entry + 2, mask=is_row, other=0)
    visible = _visible(length, WINDOW)
    count, size = _split(visible, MIN_SPLIT, MAX_SPLITS)
    longest = tl.where(count > 1, size, visible)
    first = tl.zeros([BLOCK_R], tl.int32)
    total = 0
    for begin in range(0, num_rows, BLOCK_OTHERS):
        other = begin + tl.arange(0, BLOCK_OTHERS)
        others = _visible(tl.load(rows + other * 3 + 2, mask=other < num_rows, other=0), WINDOW)
        counts, sizes = _split(others, MIN_SPLIT, MAX_SPLITS)
        others = tl.where(counts > 1, sizes, others)
        is_longer = others[None, :] > longest[:, None]
        is_before = (others[None, :] == longest[:, None]) & (other[None, :] < number[:, None])
        first += tl.sum(tl.where(is_longer | is_before, counts[None, :], 0), axis=1)
        total += tl.sum(counts, axis=0)
    split = tl.arange(0, BLOCK_S)[None, :]
    mask = split < count[:, None]
    begin = (length - visible)[:, None] + split * size[:, None]
    end = tl.where(split == count[:, None] - 1, length[:, None], begin + size[:, None])
    place = tl.where(count > 1, number * MAX_SPLITS, -1)[:, None]
    at = splits_L5 + (first[:, None] + split) * 5
    tl.store(at, tl.load(entry, mask=is_row, other=0)[:, None], mask=mask)
    tl.store(at + 1, tl.load(entry + 1, mask=is_row, other=0)[:, None], mask=mask)
    tl.store(at + 2, begin, mask=mask)
    tl.store(at + 3, end, mask=mask)
    tl.store(at + 4, place + split, mask=mask)
    if tl.program_id(0) == 0:
        tl.store(num_splits, total)


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
    splits_L5: tl.tensor,
    num_splits: tl.tensor,
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
    IS_FP8: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
    IS_INT8: tl.constexpr,
) -> None:
    """Attend to the splits whose turn it is, each for the query heads of one KV head."""
    offs_h, offs_d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    head_mask = offs_h < GROUP
    q_mask = head_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    for work in range(tl.program_id(0), tl.load(num_splits) * KV_HEADS, tl.num_programs(0)):
        split, kv_head = splits_L5 + work // KV_HEADS * 5, work % KV_HEADS
        row, table = tl.load(split).to(tl.int64), tl.load(split + 1).to(tl.int64)
        begin, end, place = tl.load(split + 2), tl.load(split + 3), tl.load(split + 4)
        head = kv_head * GROUP + offs_h
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
        if HAS_SINKS:
            is_first = tl.maximum(place, 0) % MAX_SPLITS == 0
            sink = tl.load(sinks_H + head, mask=head_mask, other=0.0) * LOG2_E
            m_i = tl.where(is_first, sink, m_i)
            l_i = tl.where(is_first, 1.0, l_i)
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        blocks = tables + table * table_stride
        first_slot = slots.to(tl.int64) * kv_head
        for tile in range(begin, end, BLOCK_N):
            token = tile + tl.arange(0, BLOCK_N)
            inside = token < end
            block = tl.load(blocks + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = first_slot + block * BLOCK_SIZE + token % BLOCK_SIZE
            if IS_INT8 or CONVERTS_FP8:  # in words of four
                offs = slot[:, None] * (HEAD_DIM // 4) + tl.arange(0, BLOCK_D // 4)[None, :]
                there = inside[:, None] & (tl.arange(0, BLOCK_D // 4) < HEAD_DIM // 4)[None, :]
            else:
                offs = slot[:, None] * HEAD_DIM + offs_d[None, :]
                there = inside[:, None] & (offs_d < HEAD_DIM)[None, :]
            k = tl.load(keys_KND + offs, mask=there, other=0)
            v = tl.load(values_KND + offs, mask=there, other=0)
            if CONVERTS_FP8:
                k = from_fp8(k).to(q.dtype)
                v = from_fp8(v).to(q.dtype)
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
        value = acc / l_i[:, None] * out_scale
        if place < 0:
            out_offs = (row * out_row + head[:, None]) * HEAD_DIM + offs_d[None, :]
            tl.store(out_THD + out_offs, value.to(out_THD.dtype.element_ty), mask=q_mask)
        else:
            at = place.to(tl.int64) * (KV_HEADS * GROUP) + head
            tl.store(lse_LH + at, m_i + tl.log2(l_i), mask=head_mask)
            tl.store(partial_LHD + at[:, None] * HEAD_DIM + offs_d[None, :], value, mask=q_mask)


@direct
@triton.jit(do_not_specialize=["out_row"])
def _combine(
    partial_LHD: tl.tensor,
    lse_LH: tl.tensor,
    rows: tl.tensor,
    out_THD: tl.tensor,
    out_row: tl.tensor,
    WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Combine the splits of one head of one row, by their log-sum-exps, if there are several."""
    number, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    entry = rows + number * 3
    visible = _visible(tl.load(entry + 2), WINDOW)
    count, _ = _split(visible, MIN_SPLIT, MAX_SPLITS)
    if count > 1:
        row = tl.load(entry).to(tl.int64)
        offs_d = tl.arange(0, BLOCK_D)
        m_i = tl.full([1], float("-inf"), tl.float32)
        l_i = tl.zeros([1], tl.float32)
        acc = tl.zeros([BLOCK_D], tl.float32)
        for begin in range(0, count, BLOCK_S):
            split = begin + tl.arange(0, BLOCK_S)
            at = (number * MAX_SPLITS + split).to(tl.int64) * heads + head
            lse = tl.load(lse_LH + at, mask=split < count, other=float("-inf"))
            there = (split < count)[:, None] & (offs_d < HEAD_DIM)[None, :]
            values = tl.load(
                partial_LHD + at[:, None] * HEAD_DIM + offs_d[None, :], mask=there, other=0.0
            )
            m_new = tl.maximum(m_i, tl.max(lse, axis=0))
            p = tl.exp2(lse - m_new)
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, axis=0)
            acc = acc * alpha + tl.sum(p[:, None] * values, axis=0)
            m_i = m_new
        place = out_THD + (row * out_row + head) * HEAD_DIM + offs_d
        tl.store(place, (acc / l_i).to(out_THD.dtype.element_ty), mask=offs_d < HEAD_DIM)
