"""Triton functions that look up the rows of a codebook.

Rows are stored in the activations' dtype, two numbers in a word, so a book has 4 to 32 KB, which
stay in a GPU's L1 caches. A sign is a bit of a number.

P threads of all tiles and warps, each with its part of a record (``packed_rows.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .code_numbers import INTERPRETED, two


@triton.jit
def read_record(
    record: tl.tensor,
    lane: tl.tensor,
    ROW_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    FINE: tl.constexpr,
    MOVES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A thread's row indices in the first and the second span, which share a word unless rows have
    four numbers; signs, high bits and scales. All are [P]; missing fields repeat the indices."""
    ROWS: tl.constexpr = 32 * (8 // ROW_SIZE)
    HIGH: tl.constexpr = ROWS if MOVES else ROWS + 32
    SCALES: tl.constexpr = 4 * HIGH + 32 * ((BITS - 7) // 2)
    # Not in thread order, in which Triton would let each thread read its neighbours' words as well.
    place = lane % 4 * 8 + lane // 4
    rows = tl.load(record + place)
    others, signs, high = rows, rows, rows
    if ROW_SIZE == 4:
        others = tl.load(record + 32 + place)
    if not MOVES:
        signs = tl.load(record + ROWS + place)
    single = record.to(tl.pointer_type(tl.int8), bitcast=True)
    pairs = record.to(tl.pointer_type(tl.int16), bitcast=True)
    if MOVES:
        high = tl.load(pairs + 2 * HIGH + place).to(tl.int32)
    elif BITS > 8:
        high = tl.load(single + 4 * HIGH + place).to(tl.int32)
    scales = tl.load(pairs + SCALES // 2 + lane // (FINE // 8)).to(tl.int32)
    return rows, others, signs, high, scales


@triton.jit
def book_numbers(
    entry: tl.tuple,
    table: tl.tensor,
    ROW_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    MOVES: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """[P, span, step, second, h, upper]."""
    a = _of_output(entry, table, 0, 0, ROW_SIZE, BITS, MOVES, DTYPE)
    b = _of_output(entry, table, 0, 1, ROW_SIZE, BITS, MOVES, DTYPE)
    c = _of_output(entry, table, 1, 0, ROW_SIZE, BITS, MOVES, DTYPE)
    d = _of_output(entry, table, 1, 1, ROW_SIZE, BITS, MOVES, DTYPE)
    # [P, step, upper, second, h, span]
    return tl.join(tl.join(a, b), tl.join(c, d)).permute(0, 5, 1, 3, 4, 2)


@triton.jit
def _of_output(
    entry: tl.tuple,
    table: tl.tensor,
    SPAN: tl.constexpr,
    H: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    MOVES: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """The numbers of one output in one span, [P, step, upper, second]."""
    rows, others, signs, high, _ = entry
    FIRST: tl.constexpr = 8 * SPAN + H
    if ROW_SIZE == 8:
        words = _row(rows, high, table, 2 * SPAN + H, ROW_SIZE, BITS)
        numbers = _signed(words, signs, FIRST, MOVES, DTYPE).reshape(words.shape[0], 2, 2, 2)
    else:
        word = others if SPAN else rows
        lower = _row(word, high, table, 4 * SPAN + H, ROW_SIZE, BITS)
        upper = _row(word, high, table, 4 * SPAN + 2 + H, ROW_SIZE, BITS)
        lower = _signed(lower, signs, FIRST, MOVES, DTYPE)
        upper = _signed(upper, signs, FIRST + 4, MOVES, DTYPE)
        numbers = tl.join(lower, upper).permute(0, 3, 1, 2)
    return numbers


@triton.jit
def _signed(
    words: tl.tensor,
    signs: tl.tensor,
    FIRST: tl.constexpr,
    MOVES: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """The two numbers of each word with their signs, [P, words, second]."""
    if not MOVES:
        pair = FIRST + 2 * tl.arange(0, words.shape[1])
        words ^= (signs[:, None] << pair[None, :]) & -0x7FFF8000
    numbers = two(words, DTYPE)
    if INTERPRETED and tl.bfloat16 == DTYPE:
        numbers = numbers.to(tl.float32)  # numpy has no bfloat16
    return numbers


@triton.jit
def _row(
    rows: tl.tensor,
    high: tl.tensor,
    table: tl.tensor,
    NUMBER: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """The words of one of a thread's rows, [P, 4 or 2]."""
    WORDS: tl.constexpr = ROW_SIZE // 2
    ABOVE: tl.constexpr = BITS - 8
    index = (rows.to(tl.uint32, bitcast=True) >> 8 * (NUMBER % 4)) & 255
    if ABOVE:
        TO: tl.constexpr = 8 - ABOVE * NUMBER
        moved = high << TO if TO > 0 else high >> -TO
        index |= moved.to(tl.uint32, bitcast=True) & (1 << BITS) - 256
    return tl.load(table + index[:, None] * WORDS + tl.arange(0, WORDS)[None, :])


@triton.jit
def odd_scales(entry: tl.tuple) -> tl.tensor:
    """[P, span, h] in fp16."""
    scales = entry[4]
    # The byte of each output, in halves of a word.
    pair = scales & 255 | (scales & 0xFF00) << 8
    low = two(pair << 1 & 0x1E001E | 0x64016401, tl.float16)
    high = two(pair >> 3 & 0x1E001E | 0x64016401, tl.float16)
    return tl.join(low, high).permute(0, 2, 1) - tl.full((), 1024, tl.float16)


@triton.jit
def moves(entry: tl.tuple, BITS: tl.constexpr) -> tl.tensor:
    """1, or -1 where numbers are moved down: [P, span, h] in fp16."""
    high = entry[3]
    FIRST: tl.constexpr = 4 * (BITS - 8)
    low = high << 15 - FIRST & 0x8000 | high << 30 - FIRST & -0x80000000
    more = high << 13 - FIRST & 0x8000 | high << 28 - FIRST & -0x80000000
    one: tl.constexpr = 0x3C003C00
    return tl.join(two(low ^ one, tl.float16), two(more ^ one, tl.float16)).permute(0, 2, 1)
