"""Triton copies between the blocks of a cache and a frame of the handoff, with its row sums.

    cache [K, N, W] of each component of each layer    frame [L][component][H][T][W]

in words of four bytes; a frame has consecutive layers that are alike. A program copies some tokens
of a head, one component of them, sixteen bytes at a time. Each byte is read once, summed and
written once. A tile of a component is consecutive in the frame, so that it lies in at most two rows
of the sums (``kernels/row_sums.py``), to which it adds its share: integers wrap around, so that any
order gives the same sums.

L layers, K heads of the cache and H of the frame, N slots of the cache, T tokens, W words of a
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..row_sums import COLUMNS, WORD, keys, rows_of
from ..signatures import FrameCells
from .launch import cdiv, direct, next_power_of_2

# Bytes that a thread moves at a time.
VECTOR_BYTES = 16
_COLUMNS = tl.constexpr(COLUMNS)
# Words of a tile, a component's tokens of a program: four vectors a thread are in flight.
_TILE = 2048
# Options of compilation.
OPTIONS = {"num_warps": 4}


def constants(
    widths: Sequence[int], pitch: int, block_size: int, *, aligned: bool, scatter: bool
) -> dict[str, Any]:
    """Compile-time constants of ``_copy_frame``, for components of ``widths`` words a token.
    ``pitch`` is the number of addresses of a layer."""
    assert max(widths) <= COLUMNS, widths  # a tile lies in two rows
    wides = tuple(next_power_of_2(width) for width in widths)
    return {
        "WIDTHS": tuple(widths),
        "WIDES": wides,
        "PITCH": pitch,
        "TOKENS": max(1, _TILE // max(wides)),
        "BLOCK": block_size,
        "ALIGNED": aligned,
        "SCATTER": scatter,
    }


def is_aligned(widths: Sequence[int], rows: int) -> bool:
    """True if each component of a frame begins at a whole vector. A frame has ``rows`` rows, one
    for each head and token."""
    return all(width * rows * WORD % VECTOR_BYTES == 0 for width in widths)


def takes(frame: torch.Tensor) -> bool:
    """True if this memory can hold a frame for the kernel."""
    return frame.is_contiguous() and frame.data_ptr() % VECTOR_BYTES == 0


def copy_frame(
    pointers_LC: torch.Tensor,
    widths: Sequence[int],
    cache_slots: int,
    block_size: int,
    cells: FrameCells,
    frame: torch.Tensor,
    *,
    scatter: bool,
) -> torch.Tensor:
    """Copy ``cells`` of the components at these addresses to ``frame``, bytes, or with ``scatter``
    the reverse. Returns the frame's row sums, int64. The caller has checked that the blocks
    exist."""
    heads, count = len(cells.heads), cells.end_token - cells.first_token
    size = len(cells.layers) * heads * count * sum(widths) * WORD
    assert takes(frame) and frame.dtype == torch.uint8 and frame.numel() == size, (
        frame.shape,
        frame.dtype,
        size,
    )
    assert cells.blocks.dtype == torch.int32 and pointers_LC.dtype == torch.int64
    sums = torch.zeros(rows_of(size), dtype=torch.int64, device=frame.device)
    if not size:
        return sums
    rows = heads * count
    pitch, aligned = pointers_LC.shape[1], is_aligned(widths, rows)
    fixed = constants(widths, pitch, block_size, aligned=aligned, scatter=scatter)
    _copy_frame[(cdiv(count, fixed["TOKENS"]), heads, len(cells.layers) * len(widths))](
        pointers_LC,
        cells.blocks,
        frame.view(torch.int32),
        sums,
        keys(frame.device),
        cells.layers.start,
        cells.heads.start,
        cells.first_token,
        count,
        cache_slots,
        **fixed,
        **OPTIONS,
    )
    return sums


@direct
@triton.jit(do_not_specialize=["first_layer", "first_head", "first_token", "count", "cache_slots"])
def _copy_frame(
    pointers_LC: tl.tensor,
    blocks: tl.tensor,
    frame: tl.tensor,
    sums: tl.tensor,
    keys: tl.tensor,
    first_layer: tl.tensor,
    first_head: tl.tensor,
    first_token: tl.tensor,
    count: tl.tensor,
    cache_slots: tl.tensor,
    WIDTHS: tl.constexpr,
    WIDES: tl.constexpr,
    PITCH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCATTER: tl.constexpr,
) -> None:
    """Copy some tokens of one head of a component of one layer."""
    COMPONENTS: tl.constexpr = len(WIDTHS)
    first = tl.program_id(0) * TOKENS
    head, heads = tl.program_id(1), tl.num_programs(1)
    layer, component = tl.program_id(2) // COMPONENTS, tl.program_id(2) % COMPONENTS
    base = tl.load(pointers_LC + (first_layer + layer) * PITCH + component)
    token = tl.arange(0, TOKENS)
    inside = first + token < count
    position = first_token + first + token
    block = tl.load(blocks + position // BLOCK, mask=inside, other=0).to(tl.int64)
    slot = block * BLOCK + position % BLOCK + (first_head + head).to(tl.int64) * cache_slots
    words = 0
    for c in tl.static_range(COMPONENTS):
        words += WIDTHS[c]
    begin = layer * heads * count * words  # of the component in the frame
    for c in tl.static_range(COMPONENTS):
        if component == c:
            start = begin + (head * count + first) * WIDTHS[c]
            _copy_tokens(
                base.to(tl.pointer_type(tl.int32)),
                frame,
                sums,
                keys,
                slot[:, None],
                inside[:, None],
                tl.multiple_of(start, 4) if ALIGNED and WIDTHS[c] % 4 == 0 else start,
                tl.minimum(TOKENS, count - first),
                WIDTHS[c],
                WIDES[c],
                TOKENS,
                SCATTER,
            )
        begin += heads * count * WIDTHS[c]


@triton.jit
def _copy_tokens(
    cache: tl.tensor,
    frame: tl.tensor,
    sums: tl.tensor,
    keys: tl.tensor,
    slot: tl.tensor,
    inside: tl.tensor,
    start: tl.tensor,
    tokens: tl.tensor,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    SCATTER: tl.constexpr,
) -> None:
    """Copy tokens between slots and the words of a frame from ``start``, and add to its sums."""
    word = tl.arange(0, WIDE)[None, :]
    there = inside & (word < WIDTH)
    cached = cache + slot * WIDTH + word
    if WIDTH % 4 == 0:  # which the address, a mere number, does not tell
        cached = tl.multiple_of(cached, (4, 16))
    place = start + tl.arange(0, TOKENS)[:, None] * WIDTH + word
    x = tl.load(frame + place if SCATTER else cached, mask=there, other=0)
    key = tl.load(keys + place % _COLUMNS, mask=there, other=0)
    tl.store(cached if SCATTER else frame + place, x, mask=there)
    product = x.to(tl.int64) * key
    row = start // _COLUMNS
    in_next = place // _COLUMNS > row
    share = tl.sum(tl.where(in_next, 0, product))
    tl.atomic_add(sums + row, share, sem="relaxed")
    if start + tokens * WIDTH > (row + 1) * _COLUMNS:
        share = tl.sum(tl.where(in_next, product, 0))
        tl.atomic_add(sums + row + 1, share, sem="relaxed")
