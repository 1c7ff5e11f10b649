"""Triton decode attention over the paged cache, all decoding rows of a step in one launch.

    q [T, H, D]   keys, values [K, N, D]   ->   out [T, H, D], whose decoding rows are filled

A program takes a part of the tokens of one sequence and one KV head, for all query heads that share
it; a second kernel combines the parts. The parts of a sequence depend on its own length only, so a
row's result is the same in any batch. Scores, sums and parts are fp32; products are taken in the
cache's dtype, or in q's where the cache has one byte a value. GPUs that convert fp8 themselves do
so to fp16, to which every code converts exactly, and multiply in it. The scale of all keys or all
values is multiplied with the scores or the results instead. A sink is one more part of its head,
without values, when parts are combined.

T rows of a step, R of them decode, H query heads, K KV heads, G = H / K, D head dimension, N slots
of the cache, S parts. Strides are counted in heads, so that Triton compiles one kernel for all of
them, which knows that they are multiples of D.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import current_target

from ..attention_metadata import AttentionParams, DecodeMetadata
from ..fp8 import FP8, indexable
from ..scaled import INT8, CachedKV, ScaledKV, TensorScaledKV
from .code_numbers import fours, two

# Tokens of a program, unless a sequence has more parts then than a GPU needs to be busy: parts take
# memory. Fewer tokens make more parts to combine, more leave a GPU idle in small batches.
SPLIT = 512
MAX_SPLITS = 64
# Parts that are combined at a time.
_PARTS = 16
# A tensor core multiplies no fewer rows or columns. float32 is multiplied without them.
_LEAST = 16
# Tokens of a tile, and the bytes of its keys as they are multiplied, so that two stages of keys and
# values fit every GPU's shared memory. float32 needs registers for them.
_TILE = 64
_TILE_INT8 = 128
_TILE_BYTES = {2: 16 << 10, 4: 8 << 10}
_LOG2_E = tl.constexpr(1.4426950408889634)
# Options of compilation.
ATTEND_OPTIONS = {"num_warps": 4, "num_stages": 2}
COMBINE_OPTIONS = {"num_warps": 4}


def converts_fp8() -> bool:
    """Return whether the GPU that kernels are compiled for converts e4m3 to fp16: NVIDIA's do
    since sm_89, in two instructions for four values."""
    target = current_target()
    return target is not None and target.backend == "cuda" and target.arch >= 89


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
    wide = max(_LEAST, triton.next_power_of_2(dim))
    group, least = heads // kv_heads, 1 if q_dtype == torch.float32 else _LEAST
    tile = _TILE_INT8 if cache_dtype == INT8 else _TILE
    shape = {
        "WINDOW": params.window or 0,
        "LEAST": SPLIT,
        "MOST": MAX_SPLITS,
        "DIM": dim,
        "WIDE": wide,
    }
    attend = {
        "CAPPED": params.soft_cap is not None,
        "BLOCK": block_size,
        "GROUP": group,
        "GROUPS": max(least, triton.next_power_of_2(group)),
        "TILE": max(_LEAST, min(tile, _TILE_BYTES[q_dtype.itemsize] // (wide * q_dtype.itemsize))),
        "PACKED": cache_dtype == FP8,
        "CONVERTED": cache_dtype == FP8 and converts_fp8(),
        "SCALED": cache_dtype == INT8,
    }
    return shape | attend, shape | {"PARTS": _PARTS, "SINKS": params.sinks}


def paged_decode(
    q_THD: torch.Tensor,
    keys_KND: CachedKV,
    values_KND: CachedKV,
    decodes: DecodeMetadata,
    params: AttentionParams,
    out_THD: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Fill the decoding rows of ``out``. ``sinks`` are scores in fp32, if ``params`` has them."""
    assert params.sinks == (sinks_H is not None)
    assert sinks_H is None or (sinks_H.dtype == torch.float32 and sinks_H.is_contiguous())
    keys, key_scales = _parts(keys_KND)
    values, value_scales = _parts(values_KND)
    heads, dim = q_THD.shape[1:]
    kv_heads, window = keys.shape[0], params.window
    assert keys.shape == values.shape and keys.is_contiguous() and values.is_contiguous()
    assert keys.shape[2] == dim and heads % kv_heads == 0, (q_THD.shape, keys.shape)
    assert key_scales.is_contiguous() and value_scales.is_contiguous()
    if keys.dtype == INT8:  # read in words
        keys, values = keys.view(torch.int32), values.view(torch.int32)
    q_THD = q_THD if keys_KND.dtype.itemsize == 1 else q_THD.to(keys_KND.dtype)
    assert out_THD.shape == q_THD.shape and decodes.table.dtype == torch.int32
    for each in (q_THD, out_THD):
        assert each.stride()[1:] == (dim, 1) and each.stride(0) % dim == 0, each.stride()
    count, visible = decodes.table.shape[0], decodes.max_seq_len
    visible = min(visible, window or visible)
    splits = min(MAX_SPLITS, triton.cdiv(visible, SPLIT))
    parts = q_THD.new_empty(count, heads, splits, dim, dtype=torch.float32)
    weights = q_THD.new_empty(count, heads, splits, dtype=torch.float32)
    attend, combine = constants(
        q_THD.dtype, keys_KND.dtype, heads, kv_heads, dim, params, decodes.block_size
    )
    _attend[(count, kv_heads, splits)](
        q_THD,
        keys,
        values,
        key_scales,
        value_scales,
        decodes.table,
        parts,
        weights,
        *_factors(params, _whole_scale(keys_KND)),
        splits,
        decodes.table.stride(0),
        q_THD.stride(0) // dim,
        keys.shape[1],
        **attend,
        **ATTEND_OPTIONS,
    )
    _combine[(count, heads)](
        parts,
        weights,
        decodes.table,
        weights if sinks_H is None else sinks_H,
        out_THD,
        splits,
        decodes.table.stride(0),
        out_THD.stride(0) // dim,
        _whole_scale(values_KND),
        **combine,
        **COMBINE_OPTIONS,
    )


def _parts(cached: CachedKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, and their scales. Where there are none, the values again, which are not read."""
    if isinstance(cached, ScaledKV):
        return cached.values, cached.scales
    values = indexable(cached.values if isinstance(cached, TensorScaledKV) else cached)
    return values, values


def _whole_scale(cached: CachedKV) -> float:
    """What all values are multiplied with."""
    return cached.scale if isinstance(cached, TensorScaledKV) else 1.0


def _factors(params: AttentionParams, key_scale: float) -> tuple[float, float]:
    """What products are multiplied with, and the soft cap, for exponentials to base 2.

    ``cap * tanh(score / cap)`` is ``cap - 2 * cap / (exp(2 * score / cap) + 1)``.
    """
    scale = params.scale * key_scale * _LOG2_E.value
    if params.soft_cap is None:
        return scale, 0.0
    return 2 * scale / params.soft_cap, params.soft_cap * _LOG2_E.value


@triton.jit
def _widened(code: tl.tensor) -> tl.tensor:
    """Widen e4m3 through the bits of a float16 256 times smaller."""
    code = code.to(tl.uint16)
    half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    wide = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), wide)


@triton.jit
def _from_int8(words: tl.tensor) -> tl.tensor:
    """Convert four codes of int8 in each word to float16, [tokens, words] to [tokens, 4 words], by
    the bits of 1024 plus a code of 0 to 255: a GPU converts integers at a quarter of its rate. In
    words, because Triton would bring int8 to the tensor cores' order byte by byte."""
    codes = words ^ -0x7F7F7F80
    magic = tl.full(codes.shape, 0x64646464, tl.int32)
    lower = fours(codes, magic, tl.full(codes.shape, 0x4140, tl.int32))
    upper = fours(codes, magic, tl.full(codes.shape, 0x4342, tl.int32))
    pairs = tl.join(two(lower, tl.float16), two(upper, tl.float16)) - 1152.0
    return pairs.permute(0, 1, 3, 2).reshape(codes.shape[0], 4 * codes.shape[1])


@triton.jit
def _size(visible: tl.tensor, LEAST: tl.constexpr, MOST: tl.constexpr) -> tl.tensor:
    """Tokens of a part of a sequence with so many visible tokens."""
    return tl.maximum(tl.cdiv(visible, MOST), LEAST)


@triton.jit(do_not_specialize=["splits", "table_stride", "q_row", "slots"])
def _attend(
    q_THD: tl.tensor,
    keys_KND: tl.tensor,
    values_KND: tl.tensor,
    key_scales_KN: tl.tensor,
    value_scales_KN: tl.tensor,
    table: tl.tensor,
    parts_RHSD: tl.tensor,
    weights_RHS: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    splits: tl.tensor,
    table_stride: tl.tensor,
    q_row: tl.tensor,
    slots: tl.tensor,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    PACKED: tl.constexpr,
    CONVERTED: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Attend to one part of one sequence, for the query heads of one KV head."""
    number, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    mine = table + number.to(tl.int64) * table_stride
    row, length = tl.load(mine).to(tl.int64), tl.load(mine + 1)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    size = _size(length - first, LEAST, MOST)
    begin = first + split * size
    end = tl.minimum(begin + size, length)
    if begin < length:
        group, column = tl.arange(0, GROUPS), tl.arange(0, WIDE)
        head = kv_head * GROUP + group
        real = (group < GROUP)[:, None] & (column < DIM)[None, :]
        q_at = (row * q_row + head[:, None]) * DIM + column[None, :]
        q = tl.load(q_THD + q_at, mask=real, other=0.0)
        if (CONVERTED or SCALED) and q.dtype == tl.bfloat16:
            # bfloat16 has numbers that fp16 has not, so each head is divided by its largest one.
            wide = q.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30)
            q = (wide / largest[:, None]).to(tl.float16)
            scales = scale * largest[:, None]
        else:
            scales = scale
        most = tl.full([GROUPS], float("-inf"), tl.float32)
        total = tl.zeros([GROUPS], tl.float32)
        sums = tl.zeros([GROUPS, WIDE], tl.float32)
        first_slot = kv_head.to(tl.int64) * slots
        for tile in range(begin, end, TILE):
            token = tile + tl.arange(0, TILE)
            inside = token < end
            block = tl.load(mine + 2 + token // BLOCK, mask=inside, other=0).to(tl.int64)
            slot = first_slot + block * BLOCK + token % BLOCK
            if SCALED:  # in words of four
                place = slot[:, None] * (DIM // 4) + tl.arange(0, WIDE // 4)[None, :]
                there = inside[:, None] & (tl.arange(0, WIDE // 4) < DIM // 4)[None, :]
            else:
                place = slot[:, None] * DIM + column[None, :]
                there = inside[:, None] & (column < DIM)[None, :]
            k = tl.load(keys_KND + place, mask=there, other=0)
            v = tl.load(values_KND + place, mask=there, other=0)
            if CONVERTED:
                k = k.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(q.dtype)
                v = v.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(q.dtype)
            elif PACKED:
                k = _widened(k).to(q.dtype)
                v = _widened(v).to(q.dtype)
            elif SCALED:
                k = _from_int8(k).to(q.dtype)
                v = _from_int8(v).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scales
            if SCALED:
                key_scale = tl.load(key_scales_KN + slot, mask=inside, other=0.0)
                scores = scores * key_scale[None, :]
            if CAPPED:
                scores = cap - 2 * cap / (tl.exp2(scores) + 1)
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, axis=1))
            chances = tl.exp2(scores - higher[:, None])
            faded = tl.exp2(most - higher)
            total = total * faded + tl.sum(chances, axis=1)
            sums = sums * faded[:, None]
            if SCALED:
                # By the largest of a tile, so that fp16 has the products.
                value_scale = tl.load(value_scales_KN + slot, mask=inside, other=0.0)
                widest = tl.maximum(tl.max(value_scale, axis=0), 1e-30)
                chances = chances * (value_scale / widest)[None, :]
                product = tl.dot(chances.to(v.dtype), v, input_precision="ieee")
                sums += product * widest
            else:
                sums += tl.dot(chances.to(v.dtype), v, input_precision="ieee")
            most = higher
        at = (number.to(tl.int64) * tl.num_programs(1) * GROUP + head) * splits + split
        kept = group < GROUP
        tl.store(weights_RHS + at, most + tl.log2(total), mask=kept)
        place = parts_RHSD + at[:, None] * DIM + column[None, :]
        tl.store(place, sums / total[:, None], mask=real)


@triton.jit(do_not_specialize=["splits", "table_stride", "out_row"])
def _combine(
    parts_RHSD: tl.tensor,
    weights_RHS: tl.tensor,
    table: tl.tensor,
    sinks_H: tl.tensor,
    out_THD: tl.tensor,
    splits: tl.tensor,
    table_stride: tl.tensor,
    out_row: tl.tensor,
    value_scale: tl.tensor,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Combine the parts of one head of one sequence, weighted by their sums of exponentials."""
    number, head = tl.program_id(0), tl.program_id(1)
    mine = table + number.to(tl.int64) * table_stride
    row, length = tl.load(mine).to(tl.int64), tl.load(mine + 1)
    visible = tl.minimum(length, WINDOW) if WINDOW else length
    count = tl.cdiv(visible, _size(visible, LEAST, MOST))
    at = (number.to(tl.int64) * tl.num_programs(1) + head) * splits
    column = tl.arange(0, WIDE)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([WIDE], tl.float32)
    for begin in range(0, count, PARTS):
        part = begin + tl.arange(0, PARTS)
        weight = tl.load(weights_RHS + at + part, mask=part < count, other=float("-inf"))
        there = (part < count)[:, None] & (column < DIM)[None, :]
        place = parts_RHSD + (at + part)[:, None] * DIM + column[None, :]
        values = tl.load(place, mask=there, other=0.0)
        higher = tl.maximum(most, tl.max(weight, axis=0))
        share = tl.exp2(weight - higher)
        faded = tl.exp2(most - higher)
        total = total * faded + tl.sum(share, axis=0)
        sums = sums * faded + tl.sum(share[:, None] * values, axis=0)
        most = higher
    if SINKS:
        sink = tl.load(sinks_H + head) * _LOG2_E
        higher = tl.maximum(most, sink)
        faded = tl.exp2(most - higher)
        total = total * faded + tl.exp2(sink - higher)
        sums = sums * faded
    place = out_THD + (row * out_row + head) * DIM + column
    tl.store(place, (sums / total * value_scale).to(out_THD.dtype.element_ty), mask=column < DIM)
