"""Triton plan of each expert's rows in one launch: ``row_blocks`` as a counting sort.

    chosen [T, K]   ->   RowBlocks

A program places some of the choices. It counts all choices of each expert, and separately those
before its own, so it knows where each expert's rows begin and how many earlier programs place.
Programs share nothing, so the plan does not depend on their order.

T rows, K experts of each, S = T K choices, E experts, B blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from .launch import cdiv, direct, next_power_of_2
from .row_blocks import RowBlocks, block_count, rows_of_a_block

# Choices that a program counts at a time, of many or few, and that it compares pairwise to
# place them.
_COUNT_STEP = 2048
_FEW = 256
_PLACE_STEP = 128
# The most programs, each of which reads all choices.
_PROGRAMS = 128
# With fewer counters than threads of a warp, Triton would compile one kernel per number of experts.
_FEWEST = 32
# Options of compilation.
_OPTIONS = {"num_warps": 4}


def plan_rows(expert_ids_TK: torch.Tensor, experts: int, sizes: Iterable[int]) -> RowBlocks:
    """Sort the choices, int64 on a GPU, by expert; a row has no expert twice. See
    ``row_blocks``."""
    expert_ids_TK = expert_ids_TK.contiguous()
    assert expert_ids_TK.dtype == torch.int64 and expert_ids_TK.numel() > 0
    rows, each = expert_ids_TK.shape
    choices, size = rows * each, rows_of_a_block(rows, each, experts, sizes)
    number = block_count(choices, experts, size)
    blocks, sources, numbers = (
        expert_ids_TK.new_empty(shape, dtype=torch.int32)
        for shape in ((number, 3), choices, choices)
    )
    owners, places = expert_ids_TK.new_empty(choices), torch.empty_like(expert_ids_TK)
    # Choices of a program, in whole steps.
    part = cdiv(cdiv(choices, _PROGRAMS), _PLACE_STEP) * _PLACE_STEP
    _plan[(cdiv(choices, part),)](
        expert_ids_TK,
        blocks,
        sources,
        numbers,
        owners,
        places,
        choices,
        each,
        experts,
        number,
        size,
        part,
        COUNTERS=max(_FEWEST, next_power_of_2(experts)),
        COUNT_STEP=_FEW if choices <= _FEW else _COUNT_STEP,
        PLACE_STEP=_PLACE_STEP,
        **_OPTIONS,
    )
    return RowBlocks(size, experts, each, blocks, sources, numbers, owners, places)


@triton.jit
def _counts(
    expert_ids: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    COUNTERS: tl.constexpr,
    COUNT_STEP: tl.constexpr,
) -> tl.tensor:
    """The number of choices of each expert from ``first`` to ``end``."""
    counts = tl.zeros((COUNTERS,), tl.int32)
    for at in range(first, end, COUNT_STEP):
        choice = at + tl.arange(0, COUNT_STEP)
        expert = tl.load(expert_ids + choice, mask=choice < end, other=0).to(tl.int32)
        counts += tl.histogram(expert, COUNTERS, mask=choice < end)
    return counts


@direct
@triton.jit(do_not_specialize=["choices", "each", "experts", "number", "size", "part"])
def _plan(
    expert_ids: tl.tensor,
    blocks: tl.tensor,
    sources: tl.tensor,
    numbers: tl.tensor,
    owners: tl.tensor,
    places: tl.tensor,
    choices: tl.tensor,
    each: tl.tensor,
    experts: tl.tensor,
    number: tl.tensor,
    size: tl.tensor,
    part: tl.tensor,
    COUNTERS: tl.constexpr,
    COUNT_STEP: tl.constexpr,
    PLACE_STEP: tl.constexpr,
) -> None:
    """Place ``part`` choices, and write some of the blocks."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    first = program * part
    last = tl.minimum(first + part, choices)
    before = _counts(expert_ids, 0, first, COUNTERS, COUNT_STEP)
    counts = before + _counts(expert_ids, first, choices, COUNTERS, COUNT_STEP)
    starts = tl.cumsum(counts, 0) - counts

    # Programs write the blocks of all experts in turn: the first of each, the second, and so on.
    expert = tl.arange(0, COUNTERS)
    block_counts = (counts + size - 1) // size
    ends = tl.cumsum(block_counts, 0)
    for block in range(program, tl.max(block_counts, 0), programs):
        there = block < block_counts
        block_at = blocks + 3 * (ends - block_counts + block)
        tl.store(block_at, expert, mask=there)
        tl.store(block_at + 1, starts + block * size, mask=there)
        tl.store(block_at + 2, tl.minimum(counts - block * size, size), mask=there)
    filled = tl.sum(block_counts, 0)
    for at in range(filled + program * COUNTERS, number, programs * COUNTERS):
        there = at + expert < number
        block_at = blocks + 3 * (at + expert)
        nothing = tl.zeros_like(expert)
        tl.store(block_at, nothing + experts - 1, mask=there)
        tl.store(block_at + 1, nothing, mask=there)
        tl.store(block_at + 2, nothing, mask=there)

    free = starts + before
    other, own = tl.arange(0, PLACE_STEP)[:, None], tl.arange(0, PLACE_STEP)[None, :]
    for at in range(first, last, PLACE_STEP):
        choice = at + tl.arange(0, PLACE_STEP)
        there = choice < last
        wide = tl.load(expert_ids + choice, mask=there, other=0)
        mine = wide.to(tl.int32)
        earlier = (mine[:, None] == mine[None, :]) & (other < own)
        place = tl.gather(free, mine, 0) + tl.sum(earlier.to(tl.int32), 0)
        tl.store(sources + place, choice // each, mask=there)
        tl.store(numbers + choice, choice, mask=there)
        tl.store(owners + place, wide, mask=there)
        tl.store(places + choice, place.to(tl.int64), mask=there)
        free += tl.histogram(mine, COUNTERS, mask=there)
