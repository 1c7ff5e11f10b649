"""Triton decode attention over the paged cache, all decoding rows of a step in one launch.

    q [T, H, D]   keys, values [K, N, D]   ->   out [T, H, D], whose decoding rows are filled

A program takes a part of the tokens of one sequence and one KV head, for all query heads that share
it; a second kernel combines the parts. The parts of a sequence depend on its own length only, so a
row's result is the same in any batch. Scores, sums and parts are fp32; products are taken in the
cache's dtype, or in q's where the cache is fp8.

T rows of a step, R of them decode, H query heads, K KV heads, G = H / K, D head dimension, N slots
of the cache, S parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..attention_metadata import AttentionParams, DecodeMetadata
from ..fp8 import FP8, indexable

# Tokens of a program, unless a sequence has more parts then than a GPU needs to be busy: parts take
# memory. Fewer tokens make more parts to combine, more leave a GPU idle in small batches.
SPLIT = 512
MOST_PARTS = 64
# Parts that are combined at a time.
_PARTS = 16
# A tensor core multiplies no fewer rows or columns.
_LEAST = 16
# Bytes of a tile of keys, so that two stages of keys and values fit every GPU's shared memory.
# float32 is multiplied without tensor cores, from registers: larger tiles would spill them.
_TILE_BYTES = {2: 16 << 10, 4: 8 << 10}
_LOG2_E = 1.4426950408889634
# Options of compilation.
ATTEND_OPTIONS = {"num_warps": 4, "num_stages": 2}
COMBINE_OPTIONS = {"num_warps": 4}


def constants(
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    block_size: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile-time constants of ``_attend`` and ``_combine``."""
    wide = max(_LEAST, triton.next_power_of_2(dim))
    group = heads // kv_heads
    shape = {"WINDOW": window or 0, "LEAST": SPLIT, "MOST": MOST_PARTS, "DIM": dim, "WIDE": wide}
    attend = {
        "BLOCK": block_size,
        "GROUP": group,
        "GROUPS": max(_LEAST, triton.next_power_of_2(group)),
        "TILE": max(_LEAST, min(64, _TILE_BYTES[q_dtype.itemsize] // (wide * q_dtype.itemsize))),
        "PACKED": cache_dtype == FP8,
    }
    return shape | attend, shape | {"PARTS": _PARTS}


def paged_decode(
    q_THD: torch.Tensor,
    keys_KND: torch.Tensor,
    values_KND: torch.Tensor,
    decodes: DecodeMetadata,
    params: AttentionParams,
    out_THD: torch.Tensor,
) -> None:
    """Fill the decoding rows of ``out``."""
    heads, dim = q_THD.shape[1:]
    kv_heads, window = keys_KND.shape[0], params.window
    assert keys_KND.shape == values_KND.shape and keys_KND.stride() == values_KND.stride()
    assert keys_KND.shape[2] == dim and heads % kv_heads == 0, (q_THD.shape, keys_KND.shape)
    assert out_THD.shape == q_THD.shape and q_THD.stride(2) == out_THD.stride(2) == 1
    assert keys_KND.stride(2) == 1 and decodes.table.dtype == torch.int32
    q_THD = q_THD if keys_KND.dtype == FP8 else q_THD.to(keys_KND.dtype)
    count, visible = decodes.table.shape[0], decodes.max_seq_len
    visible = min(visible, window or visible)
    splits = min(MOST_PARTS, triton.cdiv(visible, SPLIT))
    parts = q_THD.new_empty(count, heads, splits, dim, dtype=torch.float32)
    weights = q_THD.new_empty(count, heads, splits, dtype=torch.float32)
    attend, combine = constants(
        q_THD.dtype, keys_KND.dtype, heads, kv_heads, dim, window, decodes.block_size
    )
    _attend[(count, kv_heads, splits)](
        q_THD,
        indexable(keys_KND),
        indexable(values_KND),
        decodes.table,
        parts,
        weights,
        params.scale * _LOG2_E,
        splits,
        decodes.table.stride(0),
        *q_THD.stride()[:2],
        *keys_KND.stride()[:2],
        **attend,
        **ATTEND_OPTIONS,
    )
    _combine[(count, heads)](
        parts,
        weights,
        decodes.table,
        out_THD,
        splits,
        decodes.table.stride(0),
        *out_THD.stride()[:2],
        **combine,
        **COMBINE_OPTIONS,
    )


@triton.jit
def _widened(code: tl.tensor) -> tl.tensor:
    """Widen e4m3, which not every GPU converts, through the bits of a float16 256 times smaller."""
    code = code.to(tl.uint16)
    half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    wide = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), wide)


@triton.jit
def _size(visible: tl.tensor, LEAST: tl.constexpr, MOST: tl.constexpr) -> tl.tensor:
    """Tokens of a part of a sequence with so many visible tokens."""
    return tl.maximum(tl.cdiv(visible, MOST), LEAST)


@triton.jit(do_not_specialize=["splits", "table_stride"])
def _attend(
    q_THD: tl.tensor,
    keys_KND: tl.tensor,
    values_KND: tl.tensor,
    table: tl.tensor,
    parts_RHSD: tl.tensor,
    weights_RHS: tl.tensor,
    scale: tl.tensor,
    splits: tl.tensor,
    table_stride: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    cache_head: tl.tensor,
    cache_slot: tl.tensor,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    PACKED: tl.constexpr,
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
        q = tl.load(q_THD + row * q_row + head[:, None] * q_head + column, mask=real, other=0.0)
        most = tl.full([GROUPS], float("-inf"), tl.float32)
        total = tl.zeros([GROUPS], tl.float32)
        sums = tl.zeros([GROUPS, WIDE], tl.float32)
        at_head = kv_head.to(tl.int64) * cache_head
        for tile in range(begin, end, TILE):
            token = tile + tl.arange(0, TILE)
            inside = token < end
            block = tl.load(mine + 2 + token // BLOCK, mask=inside, other=0).to(tl.int64)
            slot = block * BLOCK + token % BLOCK
            place = at_head + slot[:, None] * cache_slot + column[None, :]
            there = inside[:, None] & (column < DIM)[None, :]
            k = tl.load(keys_KND + place, mask=there, other=0)
            v = tl.load(values_KND + place, mask=there, other=0)
            if PACKED:
                k = _widened(k).to(q.dtype)
                v = _widened(v).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, axis=1))
            chances = tl.exp2(scores - higher[:, None])
            faded = tl.exp2(most - higher)
            total = total * faded + tl.sum(chances, axis=1)
            sums = sums * faded[:, None]
            sums += tl.dot(chances.to(v.dtype), v, input_precision="ieee")
            most = higher
        at = (number.to(tl.int64) * tl.num_programs(1) * GROUP + head) * splits + split
        kept = group < GROUP
        tl.store(weights_RHS + at, most + tl.log2(total), mask=kept)
        place = parts_RHSD + at[:, None] * DIM + column[None, :]
        tl.store(place, sums / total[:, None], mask=real)


@triton.jit(do_not_specialize=["splits", "table_stride"])
def _combine(
    parts_RHSD: tl.tensor,
    weights_RHS: tl.tensor,
    table: tl.tensor,
    out_THD: tl.tensor,
    splits: tl.tensor,
    table_stride: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
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
    place = out_THD + row * out_row + head * out_head + column
    tl.store(place, (sums / total).to(out_THD.dtype.element_ty), mask=column < DIM)
