"""Triton decode attention over a paged cache of latents, all decoding rows of a step in one launch.

    q [T, H, N + R], wide [H, T, C], latents [1, slots, C + R]   ->   sums [H, T, C]

``wide`` is the part of q without position times ``k_up``, so that a token's key for all heads is
its latent, and its value the first C numbers of it (``reference/latent.py``). The GPU lists the
splits of all rows (``row_splits.py``), and a few programs for each of its processors take turns
with the pairs of a split and a block of heads. Each latent is read once for keys and values. The
result of a row with one split is written to ``sums``; those of several are merged in pairs, then in
pairs of pairs, by whichever program finishes last of two: a program that combined all of them alone
would read 2 MB for 64 splits of 16 heads, while the others are idle.

Grids and workspaces depend on the numbers of rows and heads, the width of block tables and the GPU.
Lengths and block tables are read on the GPU only, so that a CUDA graph of the launches can be
replayed with others. How a row is split depends on its own length, and in steps of many tokens also
on their number: there are no more splits than keep the GPU busy (``split_rule.py``), since each has
a partial result with as many numbers for each head as a latent. How splits are merged depends only
on their number, so that a row's result is the same whichever program is first.

Scores, sums and partial results are fp32; products are in the cache's dtype, or in q's if the cache
has one byte a value. int8, and fp8 where the GPU converts it, are widened to fp16, which is exact.

T rows of a step, H query heads, B blocks of them, P partial results, S of a row, L splits that are
listed; dimensions as in DeepSeek's papers: C of a latent, R of a rotated part, N of a query without
it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..attention_metadata import DecodeMetadata
from ..fp8 import FP8
from ..scaled import INT8, CachedKV
from . import split_rule
from .cached_kv import (
    LOG2_E,
    converts_fp8,
    half_from_fp8,
    half_from_int8,
    parts,
    whole_scale,
    widened,
)
from .launch import cached_for_gpu, cdiv, direct, next_power_of_2
from .paged_decode import processors
from .row_splits import list_constants, list_entry, split_list

# About as many tokens as a split has, unless the step has many. More leave a GPU idle in small
# batches.
MIN_SPLIT = 512
# Warps of all programs of a processor, as many as its registers hold at once.
_WARPS = 8
_MIN_DOT = 16
# Heads of a program, by bytes of a number: fp32 is multiplied without tensor cores. With more
# heads, latents are read less often, but there are no registers to widen them in.
_BLOCK_H = {4: 4, 2: _MIN_DOT}
_BLOCK_H_MORE = 32


class Constants(NamedTuple):
    """Compile-time constants and options of the kernels."""

    list_splits: dict[str, Any]
    attend: dict[str, Any]


@cached_for_gpu
def constants(
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: int,
    nope_dim: int,
    rope_dim: int,
    latent_dim: int,
    block_size: int,
    processors: int,
) -> Constants:
    """The constants for one kind of latent attention on a GPU."""
    block_h = _BLOCK_H[q_dtype.itemsize]
    if heads > block_h and q_dtype.itemsize == cache_dtype.itemsize == 2:
        block_h = _BLOCK_H_MORE
    converts = cache_dtype == FP8 and converts_fp8()
    # Registers of more warps for more heads, and for fp8 that is widened through fp32.
    many = block_h == _BLOCK_H_MORE or (cache_dtype == FP8 and not converts)
    warps, head_blocks = 8 if many else 4, cdiv(heads, block_h)
    programs = _WARPS // warps * processors
    max_splits = split_rule.max_splits(programs, head_blocks)
    step_splits = split_rule.step_splits(programs, head_blocks)
    attend = {
        "MAX_SPLITS": max_splits,
        "HEADS": heads,
        "HEAD_BLOCKS": head_blocks,
        "LATENT_DIM": latent_dim,
        "BLOCK_C": max(_MIN_DOT, next_power_of_2(latent_dim)),
        "BLOCK_SIZE": block_size,
        "NOPE_DIM": nope_dim,
        "ROPE_DIM": rope_dim,
        "BLOCK_R": max(_MIN_DOT, next_power_of_2(rope_dim)),
        "BLOCK_H": block_h,
        "BLOCK_N": 16 if q_dtype == torch.float32 else 32,
        "IS_FP8": cache_dtype == FP8,
        "CONVERTS_FP8": converts,
        "IS_INT8": cache_dtype == INT8,
        "num_warps": warps,
        "num_stages": 2 if many else 3,
    }
    splits = list_constants(None, MIN_SPLIT, max_splits, head_blocks, step_splits)
    return Constants(splits, attend)


def latent_decode(
    q_THD: torch.Tensor,
    wide_HTC: torch.Tensor,
    latents: CachedKV,
    decodes: DecodeMetadata,
    scale: float,
    sums_HTC: torch.Tensor,
) -> None:
    """Fill the decoding rows of ``sums``, which may be ``wide`` itself."""
    values, token_scales = parts(latents)
    heads, rows, latent_dim = wide_HTC.shape
    q_dim, rope_dim = q_THD.shape[2], values.shape[2] - latent_dim
    assert values.shape[0] == 1 and values.is_contiguous() and token_scales.is_contiguous()
    assert (
        wide_HTC.is_contiguous() and sums_HTC.is_contiguous() and q_THD.shape[:2] == (rows, heads)
    )
    assert sums_HTC.shape == wide_HTC.shape and 0 < rope_dim < q_dim, (q_THD.shape, values.shape)
    assert q_THD.stride()[1:] == (q_dim, 1), q_THD.stride()
    if latents.dtype.itemsize > 1:
        q_THD, wide_HTC = q_THD.to(latents.dtype), wide_HTC.to(latents.dtype)
    num_processors = processors(wide_HTC.device)
    fixed = constants(
        q_THD.dtype,
        latents.dtype,
        heads,
        q_dim - rope_dim,
        rope_dim,
        latent_dim,
        decodes.block_size,
        num_processors,
    )
    splits, num_work, finished = split_list(decodes, fixed.list_splits)
    # No row has more splits than its block table has room for.
    most_tokens = decodes.tables.shape[1] * decodes.block_size
    max_splits = min(fixed.attend["MAX_SPLITS"], cdiv(most_tokens, MIN_SPLIT))
    step_splits = fixed.list_splits["STEP_SPLITS"]
    partials = split_rule.num_partials(len(decodes.rows), max_splits, step_splits)
    partial_PHC = wide_HTC.new_empty(partials, heads, latent_dim, dtype=torch.float32)
    lse_PH = wide_HTC.new_empty(partials, heads, dtype=torch.float32)
    factor = whole_scale(latents)
    programs = _WARPS // fixed.attend["num_warps"] * num_processors
    _attend_latents[(min(len(splits) * fixed.attend["HEAD_BLOCKS"], programs),)](
        q_THD,
        wide_HTC,
        values,
        token_scales,
        decodes.tables,
        splits,
        num_work,
        finished,
        partial_PHC,
        lse_PH,
        sums_HTC,
        scale * factor * LOG2_E.value,
        factor,
        decodes.tables.stride(0),
        q_THD.stride(0),
        rows,
        **fixed.attend,
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


@direct
@triton.jit(do_not_specialize=["table_stride", "q_row", "step_rows"])
def _attend_latents(
    q_THD: tl.tensor,
    wide_HTC: tl.tensor,
    latents: tl.tensor,
    token_scales: tl.tensor,
    tables: tl.tensor,
    splits_L6: tl.tensor,
    num_work: tl.tensor,
    finished_PB: tl.tensor,
    partial_PHC: tl.tensor,
    lse_PH: tl.tensor,
    sums_HTC: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    table_stride: tl.tensor,
    q_row: tl.tensor,
    step_rows: tl.tensor,
    MAX_SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
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
    """Attend to the splits whose turn it is, each for some of the heads."""
    offs_c, offs_r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    # Programs of a split's other heads are next to each other, so that they find latents in the L2.
    end_work = tl.load(num_work) * HEAD_BLOCKS
    # What is the same in all turns is computed in each, or it would take registers of the loop.
    for work in tl.range(tl.program_id(0), end_work, tl.num_programs(0), disable_licm=True):
        row, table_row, begin, end, num_splits, place = list_entry(splits_L6, work // HEAD_BLOCKS)
        table = tables + table_row.to(tl.int64) * table_stride
        head = work % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
        is_head = head < HEADS
        c_mask = is_head[:, None] & (offs_c < LATENT_DIM)[None, :]
        r_mask = is_head[:, None] & (offs_r < ROPE_DIM)[None, :]
        at = head.to(tl.int64) * step_rows + row
        c_offs = at[:, None] * LATENT_DIM + offs_c[None, :]
        q_c = tl.load(wide_HTC + c_offs, mask=c_mask, other=0.0)
        r_offs = row.to(tl.int64) * q_row + head[:, None] * (NOPE_DIM + ROPE_DIM) + NOPE_DIM
        q_r = tl.load(q_THD + r_offs + offs_r[None, :], mask=r_mask, other=0.0)
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
        if num_splits == 1:
            whole = (values * value_scale).to(sums_HTC.dtype.element_ty)
            tl.store(sums_HTC + c_offs, whole, mask=c_mask)
        else:
            first, split = place // MAX_SPLITS, place % MAX_SPLITS
            lse_SH = lse_PH + first * HEADS
            partial_SHC = partial_PHC + first.to(tl.int64) * (HEADS * LATENT_DIM)
            offs = head[:, None] * LATENT_DIM + offs_c[None, :]
            tl.store(partial_SHC + split * (HEADS * LATENT_DIM) + offs, values, mask=c_mask)
            tl.store(lse_SH + split * HEADS + head, m_i + tl.log2(l_i), mask=is_head)
            _merge(
                partial_SHC,
                lse_SH,
                finished_PB + first * HEAD_BLOCKS + work % HEAD_BLOCKS,
                sums_HTC + row.to(tl.int64) * LATENT_DIM,
                split,
                num_splits,
                head,
                step_rows,
                value_scale,
                HEADS,
                HEAD_BLOCKS,
                LATENT_DIM,
                BLOCK_C,
            )


@triton.jit
def _merge(
    partial_SHC: tl.tensor,
    lse_SH: tl.tensor,
    finished_S: tl.tensor,
    sums_HTC: tl.tensor,
    split: tl.tensor,
    num_splits: tl.tensor,
    head: tl.tensor,
    step_rows: tl.tensor,
    value_scale: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Merge a row's split with those next to it, by their log-sum-exps, as far as these are
    finished; the last program writes the row's result.

    Splits are the leaves of a tree of pairs. Each half of a pair has its result in the place of its
    first split. The counter of the right half's is the pair's: who finds it at one goes on.
    """
    offs_c = tl.arange(0, BLOCK_C)
    is_head = head < HEADS
    mask = is_head[:, None] & (offs_c < LATENT_DIM)[None, :]
    offs = head[:, None] * LATENT_DIM + offs_c[None, :]
    width = 1
    while width < num_splits:
        left = split // (2 * width) * (2 * width)
        right = left + width
        width *= 2
        if right < num_splits:  # or there is no other half
            tl.debug_barrier()  # all threads have stored what the count releases
            counter = finished_S + right * HEAD_BLOCKS
            if tl.atomic_add(counter, 1, sem="acq_rel") == 0:
                width = num_splits
            else:
                tl.store(counter, 0)  # for the next layer
                # Read past the first-level cache, which may have older ones.
                left_lse = tl.load(lse_SH + left * HEADS + head, is_head, 0.0, cache_modifier=".cg")
                right_lse = tl.load(
                    lse_SH + right * HEADS + head, is_head, 0.0, cache_modifier=".cg"
                )
                lefts = partial_SHC + left * (HEADS * LATENT_DIM) + offs
                rights = partial_SHC + right * (HEADS * LATENT_DIM) + offs
                left_values = tl.load(lefts, mask, 0.0, cache_modifier=".cg")
                right_values = tl.load(rights, mask, 0.0, cache_modifier=".cg")
                largest = tl.maximum(left_lse, right_lse)
                left_share, right_share = tl.exp2(left_lse - largest), tl.exp2(right_lse - largest)
                total = left_share + right_share
                values = left_values * (left_share / total)[:, None]
                values += right_values * (right_share / total)[:, None]
                if width < num_splits:
                    tl.debug_barrier()  # all threads have read what is replaced
                    tl.store(lefts, values, mask=mask)
                    tl.store(lse_SH + left * HEADS + head, largest + tl.log2(total), mask=is_head)
                else:
                    whole = (values * value_scale).to(sums_HTC.dtype.element_ty)
                    at = head.to(tl.int64)[:, None] * step_rows * LATENT_DIM + offs_c[None, :]
                    tl.store(sums_HTC + at, whole, mask=mask)
