"""Triton kernels that draw a token for each row of logits.

    table [S, COLUMNS]   slots [R]   logits [R, V]   ->   tokens [R]

Everything about a sequence is in its row of the table, its slot: parameters, the number of tokens
drawn so far, and the addresses of lists that few have. So nothing about a step comes from the
host, and a row that does not use a filter leaves its kernel at once. Slot -1 is padding.

A draw is that of ``shared/engine/rank/sampler.py``: the inverse of the cumulative distribution at
splitmix64 of the seed and the number of the output. Filters are thresholds on logits, the *floors*.
Sums are taken by blocks of V in a fixed order, so a draw does not depend on its batch.

    edit     applies biases, penalties and restrictions (sampling_edits.py)
    measure  finds the maximum of each block, and its mass
    floors   finds the floors of rows, and the masses of blocks without what is below
             (sampling_floors.py)
    draw     chooses a block by these, and a token in it

R rows, S slots, V vocabulary, B blocks of a row. A token's mass is its probability divided by that
of the row's best token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, direct, next_power_of_2
from .sampling_edits import LAST_RESORT, edit_logits
from .sampling_floors import FARTHEST, find_floors
from .sampling_table import (
    COUNTS,
    EDITED,
    INDEX,
    MASK,
    PREFIX,
    RECENT,
    SCALE,
    STREAM,
    list_in,
    number_in,
    slot_of,
)

# Tokens of a block.
BLOCK = 4096

_OPTIONS = {"num_warps": 8}
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


def draw_tokens(
    table_SC: torch.Tensor,
    slots_R: torch.Tensor,
    logits_RV: torch.Tensor,
    last_tokens_S: torch.Tensor,
    *,
    edited: bool = True,
    filtered: bool = True,
) -> torch.Tensor:
    """Draw a token for each row of fp32 logits, which are changed; int32, -1 if a row's logits are
    not finite.

    Adds the token to its slot's history and sets ``last_tokens`` (0 if not finite). Rows of padding
    stay undefined. Kernels are left out unless some rows may be ``edited`` or ``filtered``.
    """
    rows, vocab = logits_RV.shape
    assert logits_RV.dtype == torch.float32 and logits_RV.is_contiguous()
    assert slots_R.dtype == last_tokens_S.dtype == torch.int32 and slots_R.shape == (rows,)
    tokens_R = slots_R.new_empty(rows)
    if not rows:
        return tokens_R
    blocks = cdiv(vocab, BLOCK)
    sizes = {"BLOCK": BLOCK, "BLOCKS": next_power_of_2(blocks)}
    # Each on its own, so that all are aligned alike.
    maxima_RB, sums_RB = (logits_RV.new_empty(rows, blocks) for _ in range(2))
    firsts_RB = slots_R.new_empty(rows, blocks)
    floors_R = logits_RV.new_empty(rows)
    # Never written without filters.
    distances_RB, squares_RB, arrived_R = sums_RB, sums_RB, tokens_R
    if filtered:
        distances_RB, squares_RB = (logits_RV.new_empty(rows, blocks) for _ in range(2))
        arrived_R = slots_R.new_empty(rows)
    state, stats = (table_SC, slots_R, logits_RV), (maxima_RB, sums_RB)
    if edited:
        edit_logits(*state)
    measured = (*stats, firsts_RB, floors_R, distances_RB, squares_RB, arrived_R)
    _measure[(rows, blocks)](*state, *measured, vocab, BLOCK=BLOCK, FILTERED=filtered, **_OPTIONS)
    if filtered:
        moments = (sums_RB, distances_RB, squares_RB)
        find_floors(*state, maxima_RB, moments, floors_R, arrived_R, sizes)
    drawn = (tokens_R, last_tokens_S)
    _draw[(rows,)](*state, *stats, firsts_RB, floors_R, *drawn, vocab, **sizes, **_OPTIONS)
    return tokens_R


@direct
@triton.jit
def _measure(
    table: tl.tensor,
    slots: tl.tensor,
    logits: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    firsts: tl.tensor,
    floors: tl.tensor,
    distances: tl.tensor,
    squares: tl.tensor,
    arrived: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
) -> None:
    """The maximum of a block, inf if it is not finite. For a row that takes the best token, the
    first one that has it; for others the block's mass relative to it, and the sums of distances
    from it in twofold steps, and of their squares, by mass. Clears what the next kernels fill."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(slots + row) < 0:
        return
    slot = slot_of(table, slots)
    if block == 0:
        tl.store(floors + row, float("-inf"))
        if FILTERED:
            tl.store(arrived + row, 0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
    edited = (tl.load(slot + MASK) != 0) | (tl.load(slot + EDITED) != 0)
    lowest = tl.where(edited, float("-inf"), -3.4028234e38)
    valid = (x < float("inf")) & ((x >= lowest) | (token >= vocab))
    best = tl.max(tl.where(valid, x, float("inf")), 0)
    at = row * blocks + block
    tl.store(maxima + at, best)
    scale = number_in(slot + SCALE)
    if scale == 0:
        tl.store(firsts + at, tl.min(tl.where(x == best, token, vocab), 0))
    elif tl.abs(best) < float("inf"):
        above = (x - best) * scale
        mass = tl.exp2(above)
        tl.store(sums + at, tl.sum(mass, 0))
        if FILTERED:
            distance = tl.minimum(-above, FARTHEST)  # a number also without a mass
            tl.store(distances + at, tl.sum(mass * distance, 0))
            tl.store(squares + at, tl.sum(mass * distance * distance, 0))


@triton.jit
def _kept(x: tl.tensor, floor: tl.tensor, best: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Masses relative to a block's best, 0 below the floor."""
    below = x - tl.maximum(best, LAST_RESORT)  # a number even if all of the block is blocked
    return tl.where(x >= floor, tl.exp2(below * scale), 0.0)


@triton.jit
def _mix(z: tl.tensor) -> tl.tensor:
    z += _GOLDEN
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(slot: tl.tensor) -> tl.tensor:
    """The number in [0, 1) of the seed and of this output."""
    index = (tl.load(slot + INDEX) + 1).to(tl.uint64, bitcast=True)
    hashed = _mix(tl.load(slot + STREAM).to(tl.uint64, bitcast=True) + index * _GOLDEN)
    return (hashed >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _first_above(sums: tl.tensor, total: tl.tensor, point: tl.tensor) -> tl.tensor:
    """The place of the first cumulative sum above a point, but none beyond the last mass."""
    place = tl.sum((sums <= point).to(tl.int32), 0)
    return tl.minimum(place, tl.sum((sums < total).to(tl.int32), 0))


@direct
@triton.jit
def _draw(
    table: tl.tensor,
    slots: tl.tensor,
    logits: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    firsts: tl.tensor,
    floors: tl.tensor,
    tokens: tl.tensor,
    last_tokens: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Draw a token for a row, and add it to its slot."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row) < 0:
        return
    slot, scale = slot_of(table, slots), number_in(slot_of(table, slots) + SCALE)
    block, blocks = tl.arange(0, BLOCKS), tl.cdiv(vocab, BLOCK)
    at, there = row * blocks + block, block < blocks
    highest = tl.load(maxima + at, mask=there, other=float("-inf"))
    best = tl.max(highest, 0)
    token = 0  # if all are blocked
    if scale == 0:
        first = tl.load(firsts + at, mask=there & (highest == best), other=vocab)
        token = tl.min(first, 0)
    elif tl.abs(best) < float("inf"):
        some = highest > float("-inf")
        masses = tl.load(sums + at, mask=there & some, other=0.0)
        floor = tl.load(floors + row)
        if floor == float("-inf"):
            masses *= tl.exp2(tl.where(some, highest - best, 0.0) * scale)
        masses = masses.to(tl.float64)
        upto = tl.cumsum(masses, 0)
        total = tl.max(upto, 0)
        point = _uniform(slot) * total
        chosen = _first_above(upto, total, point)
        before = tl.max(tl.where(block < chosen, upto, 0.0), 0)
        block_best = tl.load(maxima + row * blocks + chosen)
        inside = chosen * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + inside, mask=inside < vocab, other=float("-inf"))
        kept = _kept(x, floor, block_best, scale).to(tl.float64)
        upto_token = tl.cumsum(kept, 0)
        share = tl.exp2((block_best - best) * scale).to(tl.float64)
        rest = (point - before) / share
        token = chosen * BLOCK + _first_above(upto_token, tl.max(upto_token, 0), rest)
    tl.store(slot + MASK, tl.zeros((), tl.int64))
    finite = best < float("inf")
    tl.store(tokens + row, tl.where(finite, token, -1))
    tl.store(last_tokens + tl.load(slots + row), tl.where(finite, token, 0))
    if finite:
        index = tl.load(slot + INDEX)
        tl.store(slot + INDEX, index + 1)
        if tl.load(slot + COUNTS) != 0:
            drawn = list_in(slot + COUNTS) + token
            tl.store(drawn, tl.load(drawn) + 2)
        prefix = tl.load(slot + PREFIX)
        if prefix > 0:
            tl.store(list_in(slot + RECENT) + index % prefix, token)
