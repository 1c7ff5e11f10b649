"""Triton attention of chunks over a paged cache of latents, all chunks of a step in one launch.

    q [T, H, N + R], wide [H, T, C], latents [1, slots, C + R]   ->   sums [H, T, C]

Queries and sums are as in ``latent_decode.py``: a token's key for all heads is its latent, and its
value the first C numbers of it. So the heads of a row, and those of its neighbours, make one tile;
a program attends with one tile, and reads each block of latents once, for keys and values. Blocks
are attended one after the other, and a program finds its chunk, as in ``chunk_attention.py``.

Scores and sums are fp32; products are in the cache's dtype, or in q's if the cache has one byte a
value.

T rows of a step, H query heads, C dimensions of a latent, N of a query without position, R of its
rotated part.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import current_target

from ..attention_metadata import ChunkMetadata
from ..fp8 import FP8
from ..scaled import INT8, CachedKV
from .cached_kv import LOG2_E, converts_fp8, parts, whole_scale
from .chunk_attention import FP16_SHARE, LOWEST, MIN_DOT, find_rows
from .latent_decode import latents_at
from .launch import cached_for_gpu, cdiv, direct, next_power_of_2

# Rows and tokens of a tile. Sums of 64 rows take half of the registers of eight warps; where the
# tensor cores do not read queries from shared memory, those take them too, and so do codes that are
# widened there. float32 is multiplied without tensor cores, from registers.
_TILE, _TILE_WIDE, _TILE_HOPPER = (32, 32), (64, 32), (64, 64)
_TILE_CODES, _TILE_FP32 = (16, 32), (16, 16)
# Before 3.9, Triton fails to pipeline assembly that is not pure (``cached_kv.py``) where the tensor
# cores of Blackwell take its results.
_PIPELINES_CODES = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


@cached_for_gpu
def constants(
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: int,
    nope_dim: int,
    rope_dim: int,
    latent_dim: int,
    block_size: int,
) -> dict[str, Any]:
    """Compile-time constants of ``_attend_latent_chunks``, and its options of compilation."""
    generation = _generation()
    rows, tokens = _tile(q_dtype, cache_dtype, generation)
    pipelined = _PIPELINES_CODES or cache_dtype.itemsize > 1 or not 100 <= generation < 120
    head_blocks = cdiv(heads, rows)
    return {
        "HEADS": heads,
        "HEAD_BLOCKS": head_blocks,
        "GROUP": cdiv(heads, head_blocks),
        "LATENT_DIM": latent_dim,
        "BLOCK_C": max(MIN_DOT, next_power_of_2(latent_dim)),
        "NOPE_DIM": nope_dim,
        "ROPE_DIM": rope_dim,
        "BLOCK_R": max(MIN_DOT, next_power_of_2(rope_dim)),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": rows,
        "BLOCK_N": tokens,
        "IS_FP8": cache_dtype == FP8,
        "CONVERTS_FP8": cache_dtype == FP8 and converts_fp8(),
        "IS_INT8": cache_dtype == INT8,
        "num_warps": 8,
        "num_stages": 2 if pipelined else 1,
    }


def _generation() -> int:
    """That of the NVIDIA GPU to compile for, such as 90; 0 for others."""
    target = current_target()
    return target.arch if target is not None and target.backend == "cuda" else 0


def _tile(q_dtype: torch.dtype, cache_dtype: torch.dtype, generation: int) -> tuple[int, int]:
    """Rows and tokens of a tile."""
    if q_dtype == torch.float32:
        return _TILE_FP32
    if (cache_dtype == INT8 and generation < 90) or (cache_dtype == FP8 and not converts_fp8()):
        return _TILE_CODES
    if 90 <= generation < 120:  # over 200 KiB of shared memory for a program
        return _TILE_HOPPER if generation < 100 else _TILE_WIDE
    return _TILE


def latent_chunks(
    q_THD: torch.Tensor,
    wide_HTC: torch.Tensor,
    latents: CachedKV,
    chunks: ChunkMetadata,
    scale: float,
    sums_HTC: torch.Tensor,
) -> None:
    """Fill the chunks' rows of ``sums``, which may be ``wide`` itself."""
    values, token_scales = parts(latents)
    heads, rows, latent_dim = wide_HTC.shape
    q_dim, rope_dim = q_THD.shape[2], values.shape[2] - latent_dim
    assert values.shape[0] == 1 and values.is_contiguous() and token_scales.is_contiguous()
    assert wide_HTC.is_contiguous() and sums_HTC.is_contiguous()
    assert q_THD.shape[:2] == (rows, heads) and sums_HTC.shape == wide_HTC.shape
    assert 0 < rope_dim < q_dim, (q_THD.shape, values.shape)
    assert q_THD.stride()[1:] == (q_dim, 1) and scale > 0, q_THD.stride()
    assert chunks.chunks.dtype == chunks.tables.dtype == torch.int32
    if latents.dtype.itemsize > 1:
        q_THD, wide_HTC = q_THD.to(latents.dtype), wide_HTC.to(latents.dtype)
    fixed = constants(
        q_THD.dtype,
        latents.dtype,
        heads,
        q_dim - rope_dim,
        rope_dim,
        latent_dim,
        chunks.block_size,
    )
    count = len(chunks.chunks)
    # As many as there may be, however the rows are divided between chunks.
    row_blocks = rows // (fixed["BLOCK_M"] // fixed["GROUP"]) + count
    factor = whole_scale(latents)
    _attend_latent_chunks[(row_blocks * fixed["HEAD_BLOCKS"],)](
        q_THD,
        wide_HTC,
        values,
        token_scales,
        chunks.chunks,
        chunks.tables,
        sums_HTC,
        scale * factor * LOG2_E.value,
        factor,
        count,
        chunks.tables.stride(0),
        q_THD.stride(0),
        rows,
        **fixed,
    )


@triton.jit
def _heads_and_rows(
    offs_m: tl.tensor,
    head_block: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Each tile row's head and row of its chunk, and whether it is there; others are as the
    last."""
    head, of_chunk = head_block * GROUP + offs_m % GROUP, first + offs_m // GROUP
    real = (of_chunk < num_rows) & (head < HEADS)
    if BLOCK_M % GROUP != 0:
        real = real & (offs_m < BLOCK_M // GROUP * GROUP)
    return head, tl.minimum(of_chunk, num_rows - 1), real


@direct
@triton.jit(do_not_specialize=["count", "table_stride", "q_row", "step_rows"])
def _attend_latent_chunks(
    q_THD: tl.tensor,
    wide_HTC: tl.tensor,
    latents: tl.tensor,
    token_scales: tl.tensor,
    chunks: tl.tensor,
    tables: tl.tensor,
    sums_HTC: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    count: tl.tensor,
    table_stride: tl.tensor,
    q_row: tl.tensor,
    step_rows: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_FP8: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
    IS_INT8: tl.constexpr,
) -> None:
    """Attend with some rows of one chunk, for some of their heads."""
    ROWS: tl.constexpr = BLOCK_M // GROUP
    # One axis, since a tile may have a single row, and others are limited to 65,535 programs. The
    # last rows of a chunk see most tokens and begin first.
    head_block = tl.program_id(0) % HEAD_BLOCKS
    number = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEAD_BLOCKS
    entry, first = find_rows(chunks, count, number, ROWS)
    first_row, num_rows, start = tl.load(entry), tl.load(entry + 1), tl.load(entry + 3)
    table = tables + tl.load(entry + 2).to(tl.int64) * table_stride
    if first >= 0 and first < num_rows:
        offs_m, offs_c, offs_r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
        head, of_chunk, real = _heads_and_rows(
            offs_m, head_block, first, num_rows, HEADS, GROUP, BLOCK_M
        )
        row, seen_to = first_row.to(tl.int64) + of_chunk, start + of_chunk + 1
        # The tokens that any row sees, and those that all see.
        end, all_to = tl.max(seen_to, axis=0), tl.min(seen_to, axis=0)
        c_mask = real[:, None] & (offs_c < LATENT_DIM)[None, :]
        c_offs = (head.to(tl.int64) * step_rows + row)[:, None] * LATENT_DIM + offs_c[None, :]
        q_c = tl.load(wide_HTC + c_offs, mask=c_mask, other=0.0)
        r_mask = real[:, None] & (offs_r < ROPE_DIM)[None, :]
        r_offs = row * q_row + head * (NOPE_DIM + ROPE_DIM) + NOPE_DIM
        q_r = tl.load(q_THD + r_offs[:, None] + offs_r[None, :], mask=r_mask, other=0.0)
        m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        acc_scale = 1e-30
        for tile in range(0, end, BLOCK_N):
            offs_n = tile + tl.arange(0, BLOCK_N)
            token = tl.minimum(offs_n, end - 1)  # also for the alignment of slots: latent_decode.py
            block = tl.load(table + token // BLOCK_SIZE)
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
            qk = tl.dot(q_r, tl.trans(k_r), input_precision="ieee")
            qk = tl.dot(q_c, tl.trans(k_c), qk, input_precision="ieee")
            if IS_INT8:
                token_scale = tl.load(token_scales + slot)
                qk = qk * token_scale[None, :]
            if tile + BLOCK_N > all_to:
                qk = tl.where(offs_n[None, :] < seen_to[:, None], qk, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(qk, axis=1) * scale)
            p = tl.exp2(qk * scale - m_new[:, None])
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, axis=1)
            if IS_INT8:
                # Sums are relative to the largest scale up to here, so that products fit fp16.
                new_scale = tl.maximum(acc_scale, tl.max(token_scale, axis=0))
                p = p * (token_scale * (FP16_SHARE / new_scale))[None, :]
                alpha = alpha * (acc_scale / new_scale)
                acc_scale = new_scale
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(k_c.dtype), k_c, acc, input_precision="ieee")
            m_i = m_new
        if IS_INT8:
            value_scale = acc_scale / FP16_SHARE
        sums = acc / l_i[:, None] * value_scale
        # Read once more, since the places of rows would take registers of the loop.
        offs_m += tl.load(entry, volatile=True) - first_row
        head, of_chunk, real = _heads_and_rows(
            offs_m, head_block, first, num_rows, HEADS, GROUP, BLOCK_M
        )
        c_mask = real[:, None] & (offs_c < LATENT_DIM)[None, :]
        row = first_row.to(tl.int64) + of_chunk
        c_offs = (head.to(tl.int64) * step_rows + row)[:, None] * LATENT_DIM + offs_c[None, :]
        tl.store(sums_HTC + c_offs, sums.to(sums_HTC.dtype.element_ty), mask=c_mask)
