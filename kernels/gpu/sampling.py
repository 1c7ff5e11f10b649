"""Triton kernels that draw a token for each row of logits.

    table [S, COLUMNS]   slots [R]   logits [R, V]   ->   tokens [R]

Everything about a sequence is in its row of the table, its slot: parameters, the number of tokens
drawn so far, and the addresses of lists that few have. So nothing about a step comes from the
host, and a row that does not use a filter leaves its kernel at once. Slot -1 is padding.

A draw is that of ``shared/engine/rank/sampler.py``: the inverse of the cumulative distribution at
splitmix64 of the seed and the number of the output. Filters are thresholds on logits, the *floors*.
Sums are taken by blocks of V in a fixed order, so a draw does not depend on its batch.

    measure  edits each block (sampling_edits.py), and finds its maximum and its mass
    narrow   sums what reaches some pivots, which leaves a smaller range to the floor; several times
    gather   lists the logits of this range, and sums those above it
    draw     finds the floor among those listed (sampling_floors.py), and the masses of blocks
             without what is below; chooses a block by these, and a token in it

R rows, S slots, V vocabulary, B blocks of a row. A token's mass is its probability divided by that
of the row's best token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, direct, next_power_of_2
from .sampling_edits import EDITED_TILE, ITEMS, LAST_RESORT, edit_block
from .sampling_floors import (
    FARTHEST,
    LIMIT,
    LISTED,
    find_floor,
    is_filtered,
    list_candidates,
)
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

# Also for draws without filters, since the order of their sums depends on it.
_OPTIONS = {"num_warps": 16}
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


def draw_tokens(
    table_SC: torch.Tensor,
    slots_R: torch.Tensor,
    logits_RV: torch.Tensor,
    last_tokens_S: torch.Tensor,
    *,
    filtered: bool = True,
) -> torch.Tensor:
    """Draw a token for each row of fp32 logits, which are changed; int32, -1 if a row's logits are
    not finite.

    Adds the token to its slot's history and sets ``last_tokens`` (0 if not finite). Rows of padding
    stay undefined. The kernels of filters are left out unless some rows may be ``filtered``.
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
    distances_RB, squares_RB, arrived_R = sums_RB, sums_RB, tokens_R  # of no use without filters
    if filtered:
        distances_RB, squares_RB = (logits_RV.new_empty(rows, blocks) for _ in range(2))
        arrived_R = slots_R.new_empty(rows)
    moments = (sums_RB, distances_RB, squares_RB)
    state = (table_SC, slots_R, logits_RV)
    measured = (maxima_RB, *moments, firsts_RB, arrived_R)
    edits = {"BLOCK": BLOCK, "TILE": EDITED_TILE, "ITEMS": ITEMS}
    _measure[(rows, blocks)](*state, *measured, vocab, **edits, **_OPTIONS)
    candidates = (maxima_RB, firsts_RB, maxima_RB)  # never read without filters
    if filtered:
        candidates = list_candidates(*state, maxima_RB, moments, arrived_R, sizes)
    results = (maxima_RB, sums_RB, firsts_RB, *candidates, tokens_R, last_tokens_S)
    options = {"LIMIT": LIMIT, "WIDTH": LISTED, "FILTERED": filtered}
    _draw[(rows,)](*state, *results, vocab, **sizes, **options, **_OPTIONS)
    return tokens_R


@direct
@triton.jit
def _measure(
    table: tl.tensor,
    slots: tl.tensor,
    logits: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    distances: tl.tensor,
    squares: tl.tensor,
    firsts: tl.tensor,
    arrived: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ITEMS: tl.constexpr,
) -> None:
    """Edit a block; then its maximum, inf if it was not finite. For a row that takes the best
    token, the first one that has it; for others the block's mass relative to it; and for rows with
    filters the sums of distances from it in twofold steps, and of their squares, by mass. Clears
    what the next kernel counts."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(slots + row) < 0:
        return
    slot = slot_of(table, slots)
    if block == 0:
        tl.store(arrived + row, 0)
    logits += row * vocab
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
    finite = (tl.abs(x) < float("inf")) | (token >= vocab)
    best = tl.max(tl.where(finite, x, float("inf")), 0)
    if (tl.load(slot + MASK) != 0) | (tl.load(slot + EDITED) != 0):
        edit_block(slot, logits, block * BLOCK, vocab, BLOCK, TILE, ITEMS)
        x = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        left = tl.max(tl.where(x < float("inf"), x, float("inf")), 0)
        best = tl.where(best < float("inf"), left, best)
    at = row * blocks + block
    tl.store(maxima + at, best)
    scale = number_in(slot + SCALE)
    if scale == 0:
        tl.store(firsts + at, tl.min(tl.where(x == best, token, vocab), 0))
    elif tl.abs(best) < float("inf"):
        above = (x - best) * scale
        mass = tl.exp2(above)
        tl.store(sums + at, tl.sum(mass, 0))
        if is_filtered(slots, slot):
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
    ranges: tl.tensor,
    counts: tl.tensor,
    lists: tl.tensor,
    tokens: tl.tensor,
    last_tokens: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
    FILTERED: tl.constexpr,
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
        masses *= tl.exp2(tl.where(some, highest - best, 0.0) * scale)
        floor = float("-inf")
        if FILTERED:  # noqa: SIM102  # decided when it is compiled
            if is_filtered(slots, slot):
                floor, masses = find_floor(
                    slot, logits, best, ranges, sums, counts, lists, vocab,
                    LIMIT, WIDTH, BLOCK, BLOCKS,
                )  # fmt: skip
        upto = tl.cumsum(masses.to(tl.float64), 0)
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
