"""The splits of decoding rows, listed on the GPU for kernels whose programs take turns with them.

A row's tokens are split into parts of about as many tokens, and the splits of all rows are listed,
the longest first. How a row is split depends only on its own length; with a limit on the splits of
a step, also on the tokens of the step once they are many. Rows of length 0 have none.

R decoding rows, S most splits of a row, L = R * S.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..attention_metadata import DecodeMetadata
from .launch import cdiv, direct, next_power_of_2
from .split_rule import num_partials

# Splits have a multiple of so many tokens, as most kinds of attention read at a time.
_SPLIT_UNIT = tl.constexpr(64)
# Rows that a program lists, and others with which it compares them at a time.
_BLOCK_ROWS = 8
_BLOCK_OTHERS = 128


def list_constants(
    window: int | None, min_split: int, max_splits: int, counters: int, step_splits: int = 0
) -> dict[str, Any]:
    """Compile-time constants of the list, for splits of about ``min_split`` tokens and ``counters``
    of each row.

    ``step_splits`` is an approximate limit on the splits of a step: a step that would have more has
    longer ones. Partial results are then numbered through the step instead of by row, and
    ``counters`` are those of each partial result.
    """
    return {
        "WINDOW": window or 0,
        "MIN_SPLIT": min_split,
        "MAX_SPLITS": max_splits,
        "STEP_SPLITS": step_splits,
        "COUNTERS": counters,
        "BLOCK_ROWS": _BLOCK_ROWS,
        "BLOCK_OTHERS": _BLOCK_OTHERS,
        "BLOCK_SPLITS": next_power_of_2(max_splits),
        "BLOCK_COUNTERS": next_power_of_2(counters * (max_splits if step_splits else 1)),
    }


def split_list(
    decodes: DecodeMetadata, constants: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The splits of all rows, int32 [L, 6], undefined behind the last; their number, int32 [1]; and
    counters, int32, in which programs count what they have finished. Those that rows use are zero,
    and programs set them back to zero.

    A split has its row in the step, the row of its block table, its first token, its end, the
    number of its row's splits, and S times its row's place plus its number. A row's place is its
    own number, or with a limit for the step the number of its first partial result. All layers of a
    step with the same constants share one list.
    """
    key = ("splits", *constants.values())
    if key not in decodes.derived:
        rows = decodes.rows
        assert rows.dtype == decodes.tables.dtype == torch.int32
        assert rows.is_contiguous() and decodes.tables.stride(1) == 1
        max_splits, step_splits = constants["MAX_SPLITS"], constants["STEP_SPLITS"]
        places = num_partials(len(rows), max_splits, step_splits) if step_splits else len(rows)
        splits = rows.new_empty(len(rows) * max_splits, 6)
        num_work = rows.new_empty(1)
        finished = rows.new_empty(places, constants["COUNTERS"])
        grid = (cdiv(len(rows), constants["BLOCK_ROWS"]),)
        _list_splits[grid](rows, splits, num_work, finished, len(rows), **constants)
        decodes.derived[key] = splits, num_work, finished
    splits, num_work, finished = decodes.derived[key]
    return splits, num_work, finished


@triton.jit
def _split(
    length: tl.tensor, WINDOW: tl.constexpr, min_split: tl.tensor, MAX_SPLITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """How a row is split: the number of its splits, the tokens of all but the last, and those of
    the last."""
    visible = tl.minimum(length, WINDOW) if WINDOW else length
    num_splits = tl.minimum((visible + min_split // 2) // min_split, MAX_SPLITS)
    size = tl.cdiv(tl.cdiv(visible, tl.maximum(num_splits, 1)), _SPLIT_UNIT) * _SPLIT_UNIT
    num_splits = tl.cdiv(visible, tl.maximum(size, 1))
    return num_splits, size, visible - (num_splits - 1) * size


@direct
@triton.jit(do_not_specialize=["num_rows"])
def _list_splits(
    rows: tl.tensor,
    splits_L6: tl.tensor,
    num_work: tl.tensor,
    finished: tl.tensor,
    num_rows: tl.tensor,
    WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    STEP_SPLITS: tl.constexpr,
    COUNTERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_COUNTERS: tl.constexpr,
) -> None:
    """List the splits of some rows, each one behind all longer ones."""
    number = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row, entry = number < num_rows, rows + number * 3
    length = tl.load(entry + 2, mask=is_row, other=0)
    min_split = MIN_SPLIT
    if STEP_SPLITS:
        tokens = 0
        for begin in range(0, num_rows, BLOCK_OTHERS):
            other = begin + tl.arange(0, BLOCK_OTHERS)
            tokens += tl.sum(tl.load(rows + other * 3 + 2, mask=other < num_rows, other=0), axis=0)
        min_split = tl.maximum(tl.cdiv(tokens, STEP_SPLITS), MIN_SPLIT)
    num_splits, size, last = _split(length, WINDOW, min_split, MAX_SPLITS)
    place = tl.zeros([BLOCK_ROWS], tl.int32) if STEP_SPLITS else number
    first = tl.zeros([BLOCK_ROWS], tl.int32)
    final = tl.zeros([BLOCK_ROWS], tl.int32)
    total = 0
    for begin in range(0, num_rows, BLOCK_OTHERS):
        other = begin + tl.arange(0, BLOCK_OTHERS)
        others = tl.load(rows + other * 3 + 2, mask=other < num_rows, other=0)
        counts, sizes, lasts = _split(others, WINDOW, min_split, MAX_SPLITS)
        is_before = other[None, :] < number[:, None]
        if STEP_SPLITS:
            partials = tl.where(counts > 1, counts, 0)
            place += tl.sum(tl.where(is_before, partials[None, :], 0), axis=1)
        is_same = other[None, :] == number[:, None]
        some, one = tl.maximum(counts - 1, 0)[None, :], tl.minimum(counts, 1)[None, :]
        sizes, lasts = sizes[None, :], lasts[None, :]
        # Of equally long ones, those of earlier rows come first.
        size_before = (sizes > size[:, None]) | ((sizes == size[:, None]) & is_before)
        last_before = (lasts > size[:, None]) | ((lasts == size[:, None]) & is_before)
        first += tl.sum(tl.where(size_before, some, 0) + tl.where(last_before, one, 0), axis=1)
        size_before = (sizes > last[:, None]) | ((sizes == last[:, None]) & (is_before | is_same))
        last_before = (lasts > last[:, None]) | ((lasts == last[:, None]) & is_before)
        final += tl.sum(tl.where(size_before, some, 0) + tl.where(last_before, one, 0), axis=1)
        total += tl.sum(counts, axis=0)
    split = tl.arange(0, BLOCK_SPLITS)[None, :]
    num_splits = num_splits[:, None]
    mask, is_last = split < num_splits, split == num_splits - 1
    tokens = tl.where(is_last, last[:, None], size[:, None])
    # The window begins where all splits before the last one have their tokens left.
    begin = (length - last)[:, None] - (num_splits - 1 - split) * size[:, None]
    at = splits_L6 + tl.where(is_last, final[:, None], first[:, None] + split) * 6
    tl.store(at, tl.load(entry, mask=is_row, other=0)[:, None], mask=mask)
    tl.store(at + 1, tl.load(entry + 1, mask=is_row, other=0)[:, None], mask=mask)
    tl.store(at + 2, begin, mask=mask)
    tl.store(at + 3, begin + tokens, mask=mask)
    tl.store(at + 4, tl.broadcast_to(num_splits, mask.shape), mask=mask)
    tl.store(at + 5, place[:, None] * MAX_SPLITS + split, mask=mask)
    counter = tl.arange(0, BLOCK_COUNTERS)[None, :]
    counters = COUNTERS
    if STEP_SPLITS:
        counters = tl.where(num_splits > 1, num_splits * COUNTERS, 0)
    at = finished + place[:, None] * COUNTERS + counter
    tl.store(at, 0, mask=is_row[:, None] & (counter < counters))
    if tl.program_id(0) == 0:
        tl.store(num_work, total)


@triton.jit
def list_entry(splits_L6: tl.tensor, split: tl.tensor) -> tuple[tl.tensor, ...]:
    """What the list says about a split."""
    at = splits_L6 + split * 6
    return (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
    )
