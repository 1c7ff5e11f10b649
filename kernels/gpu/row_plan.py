"""Triton plan of the rows that each expert computes, in one launch: ``row_blocks``, as a sort that
counts.

    chosen [T, K]   ->   RowBlocks

A program takes some of the choices. It counts all choices of each expert, those before its own
apart, so that it knows where each expert's rows begin and how many of them others have. Nothing is
shared with another program: the plan does not depend on which of them is first.

T rows, K experts of each, S = T K choices, E experts, B blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from .row_blocks import RowBlocks, block_count, rows_of_a_block

# Choices that a program counts at a time, and that it compares with each other to place them.
_COUNTED = 2048
_PLACED = 128
# The most programs, each of which reads all choices.
_PROGRAMS = 128
# Fewer counters than threads of a warp would be another kernel for each number of experts.
_FEWEST = 32
# Options of compilation.
_OPTIONS = {"num_warps": 4}


def plan_rows(chosen_TK: torch.Tensor, experts: int, sizes: Iterable[int]) -> RowBlocks:
    """Sort the choices, int64 on a GPU, by expert; no row chooses one twice. See ``row_blocks``."""
    chosen_TK = chosen_TK.contiguous()
    assert chosen_TK.dtype == torch.int64 and chosen_TK.numel() > 0
    rows, each = chosen_TK.shape
    choices, size = rows * each, rows_of_a_block(rows, each, experts, sizes)
    number = block_count(choices, experts, size)
    blocks, sources, numbers = (
        chosen_TK.new_empty(shape, dtype=torch.int32) for shape in ((number, 3), choices, choices)
    )
    owners, places = chosen_TK.new_empty(choices), torch.empty_like(chosen_TK)
    # Choices of a program, in whole steps.
    part = triton.cdiv(triton.cdiv(choices, _PROGRAMS), _PLACED) * _PLACED
    _plan[(triton.cdiv(choices, part),)](
        chosen_TK,
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
        COUNTERS=max(_FEWEST, triton.next_power_of_2(experts)),
        COUNTED=_COUNTED,
        PLACED=_PLACED,
        **_OPTIONS,
    )
    return RowBlocks(size, experts, each, blocks, sources, numbers, owners, places)


@triton.jit
def _counted(
    chosen: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    COUNTERS: tl.constexpr,
    COUNTED: tl.constexpr,
) -> tl.tensor:
    """How many of the choices from ``first`` to ``end`` are of each expert."""
    counts = tl.zeros((COUNTERS,), tl.int32)
    for at in range(first, end, COUNTED):
        choice = at + tl.arange(0, COUNTED)
        expert = tl.load(chosen + choice, mask=choice < end, other=0).to(tl.int32)
        counts += tl.histogram(expert, COUNTERS, mask=choice < end)
    return counts


@triton.jit(do_not_specialize=["choices", "each", "experts", "number", "size", "part"])
def _plan(
    chosen: tl.tensor,
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
    COUNTED: tl.constexpr,
    PLACED: tl.constexpr,
) -> None:
    """Place ``part`` choices, and write some of the blocks."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    first = program * part
    last = tl.minimum(first + part, choices)
    before = _counted(chosen, 0, first, COUNTERS, COUNTED)
    counts = before + _counted(chosen, first, choices, COUNTERS, COUNTED)
    starts = tl.cumsum(counts, 0) - counts

    # Programs take the blocks of all experts in turn: the first of each, the second, and so on.
    expert = tl.arange(0, COUNTERS)
    needed = (counts + size - 1) // size
    ends = tl.cumsum(needed, 0)
    for block in range(program, tl.max(needed, 0), programs):
        there = block < needed
        block_at = blocks + 3 * (ends - needed + block)
        tl.store(block_at, expert, mask=there)
        tl.store(block_at + 1, starts + block * size, mask=there)
        tl.store(block_at + 2, tl.minimum(counts - block * size, size), mask=there)
    used = tl.sum(needed, 0)
    for at in range(used + program * COUNTERS, number, programs * COUNTERS):
        there = at + expert < number
        block_at = blocks + 3 * (at + expert)
        nothing = tl.zeros_like(expert)
        tl.store(block_at, nothing + experts - 1, mask=there)
        tl.store(block_at + 1, nothing, mask=there)
        tl.store(block_at + 2, nothing, mask=there)

    free = starts + before
    other, own = tl.arange(0, PLACED)[:, None], tl.arange(0, PLACED)[None, :]
    for at in range(first, last, PLACED):
        choice = at + tl.arange(0, PLACED)
        there = choice < last
        wide = tl.load(chosen + choice, mask=there, other=0)
        mine = wide.to(tl.int32)
        earlier = (mine[:, None] == mine[None, :]) & (other < own)
        place = tl.gather(free, mine, 0) + tl.sum(earlier.to(tl.int32), 0)
        tl.store(sources + place, choice // each, mask=there)
        tl.store(numbers + choice, choice, mask=there)
        tl.store(owners + place, wide, mask=there)
        tl.store(places + choice, place.to(tl.int64), mask=there)
        free += tl.histogram(mine, COUNTERS, mask=there)
