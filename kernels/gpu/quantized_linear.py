"""Triton product of a few rows with a quantised weight, decoded in registers.

    x [R, I] fp16 or bf16   PackedCodes [O, I]   ->   out [R, O], in x's dtype

The weight's outputs are the rows of the tensor cores' products, and x's rows their columns, of
which 8 are the fewest. A program takes two tiles of outputs. Its warps read chunks of inputs in
turn, straight into the registers in which the tensor cores want them. Codes become numbers of x's
dtype, all of them exactly: or-ed into the mantissa of a power of two, from which that power is
subtracted. They are multiplied with their scale, and a minimum is added, in that dtype too: the
numbers are those to which ``decode`` writes a weight, for more rows than the kernel takes. Numbers
of a codebook's rows are looked up (``book_numbers.py``), and the rest is the same.

The sums of the warps, and of the programs between which inputs are divided where outputs are few,
are added in one order. How inputs are divided depends on the weight, and there is a kernel for each
of ``ROWS``: a row's result is the same in any batch that the same kernel takes.

``multiply_grouped`` does the same with the experts of a mixture, whose weights are one behind the
other: a program has a block of rows of one expert, or nothing to do.

R rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..block_codes import codebook
from ..block_formats import CODEBOOKS, BlockFormat
from .book_numbers import book_numbers, moves, odd_scales, read_record
from .code_numbers import numbers, two
from .launch import cdiv, direct
from .packed_codes import PackedCodes
from .row_blocks import RowBlocks
from .tiles import CHUNK, TILE

# Rows of the kernels that are compiled.
ROWS = (8, 16, 32, 64)
# Warps between which a program's inputs are divided, and its tiles of outputs. On an H100 others
# take longer for most weights.
_WARPS, _TILES = 4, 2
# Warps that keep the memory busy: 16 on each of 132 processors.
_BUSY = 16 * 132
_ALIGNMENT = 16
# Weights that are decoded at a time: 128 MB.
_DECODED = 1 << 26
# Chunks of a tile that a program decodes.
_DECODED_CHUNKS = 8
# Constants of products alone.
_OF_PRODUCTS = frozenset(("GROUPED", "ROWS", "WARPS", "TILES"))
_ADDED = 1024
# Triton 3.6 lets a thread multiply four neighbours of 32 where others take two of 16, twice.
_FOURS = tl.constexpr(triton.__version__.startswith("3.6."))


def constants(weight: PackedCodes, rows: int, *, grouped: bool = False) -> dict[str, Any]:
    """Compile-time constants of ``_multiply``."""
    book = None if weight.book is None else CODEBOOKS[weight.book]
    return {
        "NUMBERS": weight.numbers,
        "HALVES": weight.halves or book is not None,
        "WHOLE": weight.bits == 8,
        "ZERO": weight.zero,
        "GROUP": weight.group,
        # Numbers that are moved have a minimum from their scale.
        "HAS_MINIMUM": weight.minimums is not None or (book is not None and book.moves),
        # A codebook's numbers in a row, bits of a row's number, and inputs that share an odd scale.
        "ROW_SIZE": 0 if book is None else book.row_size,
        "BITS": 0 if book is None else book.bits,
        "FINE": 0 if book is None else book.group,
        # Words of a tile's chunk.
        "LENGTH": weight.words[0, 0].numel(),
        "GROUPED": grouped,
        "ROWS": next(size for size in ROWS if rows <= size),
        "WARPS": _WARPS,
        "TILES": _TILES,
    }


def multiply(x_RI: torch.Tensor, weight: PackedCodes) -> torch.Tensor:
    """The product [R, O]. For more rows than the last of ``ROWS``, it costs less to decode the
    weight once, some outputs at a time, for torch's product."""
    assert len(x_RI) > 0
    if len(x_RI) <= max(ROWS):
        return _launch(x_RI, weight, weight.outputs, None)
    step = max(TILE, _DECODED // weight.inputs // TILE * TILE)
    out_RO = x_RI.new_empty(len(x_RI), weight.outputs)
    for first in range(0, weight.outputs, step):
        part = decode(weight, slice(first, first + step), x_RI.dtype)
        torch.mm(x_RI, part.t(), out=out_RO[:, first : first + step])
    return out_RO


def decode(weight: PackedCodes, outputs: slice, dtype: torch.dtype) -> torch.Tensor:
    """Some of the outputs as numbers, [outputs, I]; the first one is a multiple of 16."""
    first, last, _ = outputs.indices(weight.outputs)
    assert first % TILE == 0
    out_OI = weight.factors.new_empty(last - first, weight.inputs, dtype=dtype)
    fixed = constants(weight, 1)
    grid = cdiv(last - first, TILE), cdiv(weight.chunks, _DECODED_CHUNKS)
    _decode[grid](
        weight.words,
        weight.scales,
        weight.scales if weight.minimums is None else weight.minimums,
        weight.factors,
        _table(weight, dtype),
        out_OI,
        _mask(weight, dtype),
        first // TILE,
        last - first,
        weight.inputs,
        weight.chunks,
        weight.scales.shape[1],
        **{name: fixed[name] for name in fixed if name not in _OF_PRODUCTS},
        CHUNKS=_DECODED_CHUNKS,
        num_warps=4,
    )
    return out_OI


def multiply_grouped(x_RI: torch.Tensor, weights: PackedCodes, plan: RowBlocks) -> torch.Tensor:
    """The products [S, O] of the plan's rows of x, with stacked weights of their experts."""
    return _launch(x_RI, weights, weights.outputs // plan.experts, plan)


def _launch(
    x_RI: torch.Tensor, weight: PackedCodes, outputs: int, plan: RowBlocks | None
) -> torch.Tensor:
    assert x_RI.shape[1] == weight.inputs
    padding = -weight.inputs % CHUNK
    x_RI = torch.nn.functional.pad(x_RI, (0, padding)) if padding else x_RI.contiguous()
    if x_RI.data_ptr() % _ALIGNMENT:  # a part of one row; Triton would compile another kernel
        x_RI = x_RI.clone()
    rows = len(x_RI) if plan is None else len(plan.sources)
    fixed = constants(weight, rows if plan is None else plan.rows, grouped=plan is not None)
    programs, steps = cdiv(outputs, TILE * _TILES), cdiv(weight.chunks, _WARPS)
    # As many programs as work for one row, whatever the batch.
    working = programs * (1 if plan is None else plan.top_k)
    of_part = cdiv(steps, max(1, min(_BUSY // (_WARPS * working), steps)))
    parts = cdiv(steps, of_part)
    out_RO = x_RI.new_empty(rows, outputs)
    sums_PRO = x_RI.new_empty(parts if parts > 1 else 0, rows, outputs, dtype=torch.float32)
    _multiply[(programs, parts, 1 if plan is None else len(plan.blocks))](
        x_RI,
        weight.words,
        weight.scales,
        weight.scales if weight.minimums is None else weight.minimums,
        weight.factors,
        _table(weight, x_RI.dtype),
        weight.words if plan is None else plan.blocks,
        weight.words if plan is None else plan.sources,
        out_RO,
        sums_PRO if parts > 1 else weight.factors,
        _mask(weight, x_RI.dtype),
        rows,
        outputs,
        weight.chunks,
        weight.scales.shape[1],
        of_part * _WARPS,
        **fixed,
        num_warps=_WARPS,
        num_stages=1,
    )
    if parts > 1:
        count = rows * outputs
        _add[(cdiv(count, _ADDED),)](sums_PRO, out_RO, count, parts, SIZE=_ADDED)
    return out_RO


def _table(weight: PackedCodes, dtype: torch.dtype) -> torch.Tensor:
    """The table in which codes are looked up; without one, any tensor."""
    if weight.book is not None:
        return _book(weight.book, dtype, weight.words.device)
    if weight.levels is not None:
        return _levels(weight.levels, dtype, weight.words.device)
    return weight.words


@cache
def _levels(levels: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The low bytes of 16 numbers of ``dtype``, four in a word, then the high ones."""
    halves = torch.tensor(levels, dtype=dtype).view(torch.uint8).view(16, 2).T.contiguous()
    return halves.view(torch.int32).flatten().to(device)


@cache
def _book(format: BlockFormat, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """All rows, two numbers of ``dtype`` in a word; in eighths if they are moved by those."""
    rows = codebook(format, device) * (8 if CODEBOOKS[format].moves else 1)
    return rows.to(dtype).view(torch.int32).flatten()


def _mask(weight: PackedCodes, dtype: torch.dtype) -> int:
    """The bits of two numbers in which there are codes. An argument of the kernel, because ptxas
    moves a constant into a register again for each instruction that has another one."""
    if weight.numbers == "int":
        return 0x000F000F if weight.halves else 0x00FF00FF
    if weight.numbers == "levels":
        return 0x44444444
    return 0x07F007F0 if dtype == torch.bfloat16 else 0x3F803F80


@triton.jit
def _read(
    word_at: tl.tensor,
    lane: tl.tensor,
    ROW_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    FINE: tl.constexpr,
    MOVES: tl.constexpr,
) -> tl.tensor:
    """A thread's words, or all that a record of rows has of it."""
    if ROW_SIZE:
        read = read_record(word_at, lane, ROW_SIZE, BITS, FINE, MOVES)
    else:
        read = tl.load(word_at)
    return read


@triton.jit
def _scaled(
    codes: tl.tensor,
    scale: tl.tensor,
    minimum: tl.tensor,
    HALVES: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tensor:
    """Codes as the numbers that they stand for but for the factor, rounded to their dtype."""
    GROUPS: tl.constexpr = scale.shape[1]
    if HALVES:
        # [tiles, warps, 32, a thread's groups, steps of a group, second, h, upper]
        codes = codes.reshape(TILES, WARPS, 32, GROUPS, 4 // GROUPS, 2, 2, 2)
        codes *= _of_codes(scale, codes)
        if HAS_MINIMUM:
            codes += _of_codes(minimum, codes)
    else:
        # [H, tiles, warps, 32, step, upper, second, h]
        codes = codes.reshape(2, TILES, WARPS, 32, 2, 2, 2, 2)
        codes *= _of_bytes(scale, codes)
        if HAS_MINIMUM:
            codes += _of_bytes(minimum, codes)
    return codes


@triton.jit
def _of_codes(pairs: tl.tensor, codes: tl.tensor) -> tl.tensor:
    """fp16 of outputs g and g + 8, [tiles, warps, 32] and groups, for codes of 4 bits."""
    wide = pairs.to(tl.float32).to(codes.dtype)
    return wide.reshape(codes.shape[0], codes.shape[1], 32, codes.shape[3], 1, 1, 2, 1)


@triton.jit
def _of_bytes(pairs: tl.tensor, codes: tl.tensor) -> tl.tensor:
    """Like ``_of_codes``, for codes of 8 bits."""
    GROUPS: tl.constexpr = pairs.shape[1]
    wide = pairs.to(tl.float32).to(codes.dtype)
    wide = wide.reshape(codes.shape[1], codes.shape[2], 32, GROUPS, 2).permute(3, 0, 1, 2, 4)
    return wide.reshape(GROUPS, codes.shape[1], codes.shape[2], 32, 1, 1, 1, 2)


@triton.jit
def _place(chunk: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Where the scales of a chunk begin among those of a tile."""
    return chunk * (8 * (64 // GROUP)) if GROUP <= 64 else chunk // (GROUP // 64) * 8


@triton.jit
def _of_step(
    scale_at: tl.tensor, chunk: tl.tensor, last: tl.tensor, GROUP: tl.constexpr
) -> tl.tensor:
    """The scales of the warps' chunks, zero for warps that have none."""
    place = _place(chunk, GROUP)
    return tl.load(scale_at + place[:, None], mask=(chunk < last)[:, None], other=0)


@triton.jit
def _places(
    A: tl.constexpr, B: tl.constexpr, WARPS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The indices of [A, B, warps, 32]."""
    place = tl.arange(0, A * B * WARPS * 32)
    return place // (B * WARPS * 32), place // (WARPS * 32) % B, place // 32 % WARPS, place % 32


@triton.jit
def _tile(number: tl.tensor, outputs: tl.tensor, TILES: tl.constexpr) -> tl.tensor:
    """The tile of a program by its number, or the last one of all: the last program may have fewer
    than the others."""
    return tl.minimum(tl.program_id(0) * TILES + number, (outputs - 1) // 16)


@direct
@triton.jit(do_not_specialize=["mask", "rows", "outputs", "chunks", "places", "part"])
def _multiply(
    x_RI: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    factors: tl.tensor,
    table: tl.tensor,
    blocks: tl.tensor,
    sources: tl.tensor,
    out_RO: tl.tensor,
    sums_PRO: tl.tensor,
    mask: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    chunks: tl.tensor,
    places: tl.tensor,
    part: tl.tensor,
    NUMBERS: tl.constexpr,
    HALVES: tl.constexpr,
    WHOLE: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    FINE: tl.constexpr,
    LENGTH: tl.constexpr,
    GROUPED: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Multiply all rows, or those of a block, with some tiles' part of the inputs. ``places`` are
    those of a tile's scales, and ``part`` is in chunks."""
    DTYPE: tl.constexpr = x_RI.dtype.element_ty
    # Groups of a chunk, and those of them whose inputs a thread has.
    GROUPS: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
    MINE: tl.constexpr = 2 if GROUPS > 1 else 1
    HALF: tl.constexpr = 1 if HALVES else 2
    READS_MINIMUM: tl.constexpr = HAS_MINIMUM and not ROW_SIZE
    first = tl.program_id(1) * part
    last = tl.minimum(first + part, chunks)
    expert, first_row, count = 0, 0, rows
    if GROUPED:
        block = blocks + 3 * tl.program_id(2)
        expert, first_row, count = tl.load(block), tl.load(block + 1), tl.load(block + 2)
        # A block without rows reads nothing but what is read ahead.
        last = tl.where(count > 0, last, first)
    before = expert * ((outputs + 15) // 16)
    # Everything is read in two dimensions, those of threads and of a thread's own numbers, so that
    # Triton spreads it over threads, then warps, then registers, as the tensor cores want it.
    # [H, tiles, warps, 32] and 4
    at, of_tile, of_warp, thread = _places(HALF, TILES, WARPS)
    tile = before + _tile(of_tile, outputs, TILES)
    lane = thread
    word_at = words + (tile.to(tl.int64) * chunks + first + of_warp) * LENGTH
    if not ROW_SIZE:
        word_at = (word_at + at * 128 + lane * 4)[:, None] + tl.arange(0, 4)[None, :]
    # [tiles, warps, 32] and a thread's groups
    _, of_tile, scale_warp, thread = _places(1, TILES, WARPS)
    tile = before + _tile(of_tile, outputs, TILES)
    scale_at = tile.to(tl.int64) * places * (8 * GROUPS) + thread // 4 * GROUPS
    if GROUPS == 4:
        scale_at += thread % 4 // 2 * 2
    scale_at = scale_at[:, None] + tl.arange(0, MINE)[None, :]
    # [spans, rows / 8, warps, 8, 4] and inputs of a thread. Rows that are not there are read as the
    # last one.
    span, eight, x_warp, thread = _places(2, ROWS // 8, WARPS)
    row = tl.maximum(tl.minimum(eight * 8 + thread // 4, count - 1), 0)
    if GROUPED:
        row = tl.load(sources + first_row + row)
    x_at = row * (chunks * 64) + span * 32 + thread % 4 * 8
    x_at = x_RI + x_at[:, None] + tl.arange(0, 8)[None, :]

    sums = tl.zeros((WARPS, TILES * 16, ROWS), tl.float32)
    word = _read(word_at, lane, ROW_SIZE, BITS, FINE, HAS_MINIMUM)
    scale = _of_step(scales + scale_at, first + scale_warp, last, GROUP)
    minimum = scale
    if READS_MINIMUM:
        minimum = _of_step(minimums + scale_at, first + scale_warp, last, GROUP)
    for step in range(first, last, WARPS):
        # The words of the next step load meanwhile. After the last ones there is memory to read.
        word_at += WARPS * LENGTH
        following = _read(word_at, lane, ROW_SIZE, BITS, FINE, HAS_MINIMUM)
        x = tl.load(x_at + (tl.minimum(step + x_warp, last - 1) * 64)[:, None])
        following_scale = _of_step(scales + scale_at, step + WARPS + scale_warp, last, GROUP)
        following_minimum = following_scale
        if READS_MINIMUM:
            following_minimum = _of_step(
                minimums + scale_at, step + WARPS + scale_warp, last, GROUP
            )
        factor, added = two(scale, tl.float16), two(minimum, tl.float16)
        if ROW_SIZE:
            codes = book_numbers(word, table, ROW_SIZE, BITS, HAS_MINIMUM, DTYPE)
            factor *= odd_scales(word)
            if HAS_MINIMUM:
                added = factor * moves(word, BITS)
        else:
            codes = numbers(word, mask, table, NUMBERS, HALVES, WHOLE, ZERO, DTYPE)
        codes = _scaled(codes, factor, added, HALVES, HAS_MINIMUM, TILES, WARPS)
        if HALVES:
            # [tiles, warps, g, t, steps, second, h, upper]
            codes = codes.reshape(TILES, WARPS, 8, 4, 4, 2, 2, 2)
            if _FOURS:
                codes = codes.permute(1, 0, 6, 2, 4, 3, 7, 5)
            else:
                codes = codes.permute(1, 0, 6, 2, 4, 7, 3, 5)
        else:
            # [H, tiles, warps, g, t, step, upper, second, h]
            codes = codes.reshape(2, TILES, WARPS, 8, 4, 2, 2, 2, 2)
            if _FOURS:
                codes = codes.permute(2, 1, 8, 3, 0, 5, 4, 6, 7)
            else:
                codes = codes.permute(2, 1, 8, 3, 0, 5, 6, 4, 7)
        codes = codes.reshape(WARPS, TILES * 16, 64)

        # [spans, rows / 8, warps, 8, t, steps, upper, second]
        x = x.reshape(2, ROWS // 8, WARPS, 8, 4, 2, 2, 2)
        x = x.permute(2, 0, 1, 3, 4, 5, 6, 7)
        x = x.reshape(WARPS, 2, ROWS, 4, 2, 2, 2)
        if _FOURS:
            x = x.permute(0, 1, 4, 3, 5, 6, 2)
        else:
            x = x.permute(0, 1, 4, 5, 3, 6, 2)
        x = x.reshape(WARPS, 64, ROWS).to(codes.dtype)
        sums = tl.dot(codes, x, sums)
        word, scale, minimum = following, following_scale, following_minimum

    total = tl.sum(sums, axis=0)
    output = tl.program_id(0) * (TILES * 16) + tl.arange(0, TILES * 16)
    factor = tl.load(factors + expert * outputs + output, mask=output < outputs, other=0)
    column = tl.arange(0, ROWS)
    out_mask = (output < outputs)[:, None] & (column < count)[None, :]
    column += first_row
    total = total * factor[:, None]
    if tl.num_programs(1) > 1:
        out_at = (tl.program_id(1).to(tl.int64) * rows + column)[None, :] * outputs + output[
            :, None
        ]
        tl.store(sums_PRO + out_at, total, mask=out_mask)
    else:
        out_at = column[None, :].to(tl.int64) * outputs + output[:, None]
        tl.store(out_RO + out_at, total.to(DTYPE), mask=out_mask)


@direct
@triton.jit(do_not_specialize=["mask", "first_tile", "outputs", "inputs", "chunks", "places"])
def _decode(
    words: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    factors: tl.tensor,
    table: tl.tensor,
    out_OI: tl.tensor,
    mask: tl.tensor,
    first_tile: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    chunks: tl.tensor,
    places: tl.tensor,
    NUMBERS: tl.constexpr,
    HALVES: tl.constexpr,
    WHOLE: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    FINE: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Write some chunks of a tile as numbers. ``outputs`` are those from the first tile on."""
    DTYPE: tl.constexpr = out_OI.dtype.element_ty
    GROUPS: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
    HALF: tl.constexpr = 1 if HALVES else 2
    tile, first = tl.program_id(0), tl.program_id(1) * CHUNKS
    # [chunks, H, 32] and 4
    flat = tl.arange(0, CHUNKS * HALF * 32)
    chunk = tl.minimum(first + flat // (HALF * 32), chunks - 1)
    word_at = words + ((first_tile + tile).to(tl.int64) * chunks + chunk) * LENGTH
    if not ROW_SIZE:
        word_at = (word_at + flat % (HALF * 32) * 4)[:, None] + tl.arange(0, 4)[None, :]
    word = _read(word_at, flat % 32, ROW_SIZE, BITS, FINE, HAS_MINIMUM)
    if ROW_SIZE:
        codes = book_numbers(word, table, ROW_SIZE, BITS, HAS_MINIMUM, DTYPE).to(tl.float32)
        if HAS_MINIMUM:
            codes += moves(word, BITS).to(tl.float32).reshape(CHUNKS * 32, 2, 1, 1, 2, 1)
        codes *= odd_scales(word).to(tl.float32).reshape(CHUNKS * 32, 2, 1, 1, 2, 1)
    else:
        codes = numbers(word, mask, table, NUMBERS, HALVES, WHOLE, ZERO, DTYPE).to(tl.float32)
    if HALVES:
        # [chunks, g, t, span, step, second, h, upper]
        codes = codes.reshape(CHUNKS, 8, 4, 2, 2, 2, 2, 2)
        codes = codes.permute(6, 1, 0, 3, 2, 4, 7, 5)
    else:
        # [chunks, H, g, t, step, upper, second, h]
        codes = codes.reshape(CHUNKS, 2, 8, 4, 2, 2, 2, 2)
        codes = codes.permute(7, 2, 0, 1, 3, 4, 5, 6)
    codes = codes.reshape(16, CHUNKS * GROUPS, 64 // GROUPS)
    row, group = tl.arange(0, 16), tl.arange(0, CHUNKS * GROUPS)
    chunk = tl.minimum(first + group // GROUPS, chunks - 1)
    place = _place(chunk, GROUP)
    pair_at = (first_tile + tile).to(tl.int64) * places * (8 * GROUPS)
    of_chunk = group % GROUPS
    if GROUPS == 4:  # by half and span
        of_chunk = of_chunk % 2 * 2 + of_chunk // 2
    pair_at = pair_at + place[None, :] + (row % 8 * GROUPS)[:, None] + of_chunk[None, :]
    output = tile * 16 + row
    factor = tl.load(factors + first_tile * 16 + output, mask=output < outputs, other=0)
    values = codes * _of_half(tl.load(scales + pair_at), row)[:, :, None]
    if HAS_MINIMUM and not ROW_SIZE:
        values += _of_half(tl.load(minimums + pair_at), row)[:, :, None]
    values *= factor[:, None, None]
    within = tl.arange(0, 64 // GROUPS)
    column = (first * 64 + group * (64 // GROUPS))[:, None] + within[None, :]
    out_mask = (output < outputs)[:, None, None] & (column < inputs)[None, :, :]
    out_at = output.to(tl.int64)[:, None, None] * inputs + column[None, :, :]
    tl.store(out_OI + out_at, values.to(DTYPE), mask=out_mask)


@triton.jit
def _of_half(pairs: tl.tensor, row: tl.tensor) -> tl.tensor:
    """The fp16 of a row of the tile, out of words with those of outputs g and g + 8."""
    bits = tl.where((row < 8)[:, None], pairs, pairs >> 16)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@direct
@triton.jit(do_not_specialize=["count", "parts"])
def _add(
    sums_PRO: tl.tensor,
    out_RO: tl.tensor,
    count: tl.tensor,
    parts: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """Add the parts, the first one first."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float32)
    part_at = sums_PRO + at
    for _ in range(parts):
        total += tl.load(part_at, mask=at < count, other=0)
        part_at += count
    tl.store(out_RO + at, total.to(out_RO.dtype.element_ty), mask=at < count)
