"""Triton kernels that find the floor of a row of logits: what is below it is not drawn.

    narrow   sums what reaches some pivots, which leaves a smaller range to the floor; several times
    gather   lists the logits of this range, and sums those above it

The draw finds the floor among those listed (``find_floor``).

R rows, S slots, V vocabulary, B blocks of a row, P parts of it, N pivots. A token's mass is its
probability divided by that of the row's best token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, direct, next_power_of_2
from .sampling_table import (
    SCALE,
    SPAN,
    TOP_K,
    TOP_P,
    count_in,
    number_in,
    slot_of,
)

# Tokens of a part, which one program compares with pivots, TILE at a time.
PART = 16384
TILE = 1024
STAGES = 4
# Times that a range is narrowed, at most.
PASSES = 3
# Logits of a block that are listed. If a range has more in the end, the row itself is searched.
LIMIT = 1024
# Listed tokens that a block compares at a time.
LISTED = 32

_OPTIONS = {"num_warps": 8}
# Columns of a row's range.
_RANGE = tl.constexpr(8)
_LOW = tl.constexpr(0)  # the floor is not below
_HIGH = tl.constexpr(1)  # and below this
_TARGET = tl.constexpr(2)  # the mass, or for top-k the number, that the floor reaches
_SUM_LOW = tl.constexpr(3)  # of what reaches these
_SUM_HIGH = tl.constexpr(4)
_OPEN = tl.constexpr(5)  # 1 if the range has to be narrowed
_PIVOTS = tl.constexpr(8)
# Twofold steps below the best token, after which nothing is left of a mass in fp32.
FARTHEST = tl.constexpr(150.0)


def list_candidates(
    table_SC: torch.Tensor,
    slots_R: torch.Tensor,
    logits_RV: torch.Tensor,
    maxima_RB: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    arrived_R: torch.Tensor,
    sizes: dict[str, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ranges of the floors of rows with filters; how many logits of each block are in them, and
    these logits. Of ``moments``, the sums become those of what is above, relative to the row's
    best."""
    rows, vocab = logits_RV.shape
    state, (sums_RB, *_) = (table_SC, slots_R, logits_RV, maxima_RB), moments
    ranges_RC = logits_RV.new_empty(rows, _RANGE.value)
    parts = cdiv(vocab, PART)
    partial_RPN = logits_RV.new_empty(rows, parts, _PIVOTS.value)
    narrow = {"PART": PART, "TILE": TILE, "STAGES": STAGES, "LIMIT": LIMIT}
    narrow["PARTS"] = next_power_of_2(parts)
    for number in range(PASSES):
        _narrow[(rows, parts)](
            *state, *moments, ranges_RC, partial_RPN, arrived_R, vocab,
            FIRST=number == 0, **narrow, **sizes, **_OPTIONS,
        )  # fmt: skip
    counts_RB = sums_RB.new_empty(sums_RB.shape, dtype=torch.int32)
    lists_RBL = logits_RV.new_empty(*sums_RB.shape, LIMIT)
    listed = (ranges_RC, sums_RB, counts_RB, lists_RBL)
    grid = sums_RB.shape
    _gather[grid](*state, *listed, vocab, LIMIT=LIMIT, WIDTH=TILE, **sizes, **_OPTIONS)
    return ranges_RC, counts_RB, lists_RBL


@triton.jit
def _mass(x: tl.tensor, best: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return tl.exp2((x - best) * scale)


@triton.jit
def is_filtered(slots: tl.tensor, slot: tl.tensor) -> tl.tensor:
    """True unless this row keeps all tokens, takes the best one, or is padding."""
    some = (count_in(slot + TOP_K) > 0) | (number_in(slot + TOP_P) < 1.0)
    some |= number_in(slot + SPAN) > float("-inf")
    return some & (number_in(slot + SCALE) > 0) & (tl.load(slots + tl.program_id(0)) >= 0)


@triton.jit
def _maximum(
    maxima: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
) -> tl.tensor:
    """The best logit of this row, from its blocks'."""
    block, blocks = tl.arange(0, BLOCKS), tl.cdiv(vocab, BLOCK)
    at = maxima + tl.program_id(0) * blocks + block
    return tl.max(tl.load(at, mask=block < blocks, other=float("-inf")), 0)


@triton.jit
def _min_p_floor(slot: tl.tensor, best: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The lowest logit that min_p keeps, if it has a mass at all."""
    return tl.maximum(best + number_in(slot + SPAN), best - FARTHEST / scale)


@triton.jit
def _likely_distance(
    share: tl.tensor,
    best: tl.tensor,
    scale: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    distances: tl.tensor,
    squares: tl.tensor,
    there: tl.tensor,
) -> tl.tensor:
    """Where a row's share of mass would end if its distances from the best token had a normal
    distribution, and the deviation of that; in twofold steps."""
    highest = tl.load(maxima, mask=there, other=float("-inf"))
    there &= highest > float("-inf")
    # Bounded, so that its square is a number where a block has no mass.
    farther = tl.where(there, tl.minimum((best - highest) * scale, FARTHEST), 0.0)
    factor = tl.exp2(-farther)
    mass = tl.load(sums, mask=there, other=0.0)
    distance = tl.load(distances, mask=there, other=0.0)
    square = tl.load(squares, mask=there, other=0.0)
    total = tl.sum(factor * mass, 0)
    mean = tl.sum(factor * (distance + farther * mass), 0) / total
    square = square + 2 * farther * distance + farther * farther * mass
    variance = tl.sum(factor * square, 0) / total - mean * mean
    deviation = tl.sqrt(tl.maximum(variance, 0.0))
    # The quantile of a normal distribution, to three digits.
    below = tl.exp2(0.14 * tl.log2(tl.maximum(share, 1e-6)))
    quantile = 4.91 * (below - tl.exp2(0.14 * tl.log2(tl.maximum(1.0 - share, 1e-6))))
    return mean + quantile * deviation, deviation


@triton.jit
def _first_pivots(
    k: tl.tensor,
    likely: tl.tensor,
    deviation: tl.tensor,
    best: tl.tensor,
    lowest: tl.tensor,
    scale: tl.tensor,
) -> tl.tensor:
    """For top-k farther apart the farther they are from the best token; for top-p around a likely
    distance, and one near the best token. The last one is the lowest."""
    pivot = tl.arange(0, _PIVOTS)
    place = pivot.to(tl.float32)
    offset = place - (_PIVOTS - 1) / 2
    around = likely + deviation * (0.06 * offset + 0.055 * offset * offset * offset)
    around = tl.where(pivot == 0, 1.5, around)
    distance = tl.where(k > 0, (0.9 + 0.35 * (place + 1)) * (place + 1), around)
    x = tl.maximum(best - distance / scale, lowest)
    return tl.where(pivot < _PIVOTS - 1, x, lowest)


@triton.jit
def _next_pivots(bounds: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Half of them evenly spread, and half around where the target is if the mass of a range is
    evenly spread."""
    pivot = tl.arange(0, _PIVOTS)
    sum_low, sum_high = tl.load(bounds + _SUM_LOW), tl.load(bounds + _SUM_HIGH)
    likely = (sum_low - tl.load(bounds + _TARGET)) / (sum_low - sum_high)
    offset = (pivot - 0.75 * _PIVOTS + 0.5).to(tl.float32)
    near = likely + 0.02 * offset * offset * offset
    even = (pivot + 1).to(tl.float32) / (_PIVOTS // 2 + 1)
    place = tl.where(pivot < _PIVOTS // 2, even, tl.minimum(tl.maximum(near, 0.0), 1.0))
    return low + (high - low) * place


@direct
@triton.jit
def _narrow(
    table: tl.tensor,
    slots: tl.tensor,
    logits: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    distances: tl.tensor,
    squares: tl.tensor,
    ranges: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    vocab: tl.tensor,
    FIRST: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Sum what reaches each pivot in a part of a row. The last program of the row that is done
    chooses the neighbouring pivots between which the floor is."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot, bounds = slot_of(table, slots), ranges + row * _RANGE
    if not FIRST:  # noqa: SIM102  # decided when it is compiled
        if tl.load(bounds + _OPEN) == 0.0:
            return
    best = _maximum(maxima, vocab, BLOCK, BLOCKS)
    if not (is_filtered(slots, slot) & (tl.abs(best) < float("inf"))):
        return
    scale, k, share = number_in(slot + SCALE), count_in(slot + TOP_K), number_in(slot + TOP_P)
    pivot = tl.arange(0, _PIVOTS)
    if FIRST:
        low, high = _min_p_floor(slot, best, scale), float("inf")
        block, blocks = tl.arange(0, BLOCKS), tl.cdiv(vocab, BLOCK)
        at, there = row * blocks + block, block < blocks
        likely, deviation = _likely_distance(
            share, best, scale, maxima + at, sums + at, distances + at, squares + at, there
        )
        pivots = _first_pivots(k, likely, deviation, best, low, scale)
        if (k == 0) & (share >= 1.0):
            if part == 0:
                tl.store(bounds + _LOW, low)
                tl.store(bounds + _HIGH, low)
                tl.store(bounds + _OPEN, 0.0)
            return
    else:
        low, high = tl.load(bounds + _LOW), tl.load(bounds + _HIGH)
        pivots = _next_pivots(bounds, low, tl.minimum(high, best))
    reaching = tl.zeros((_PIVOTS, TILE), tl.float32)
    end = tl.minimum(part * PART + PART, vocab)
    for start in tl.range(part * PART, end, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
        weight = tl.where(k > 0, 1.0, _mass(x, best, scale))
        # An addition with a condition is one instruction, the choice of what is added another.
        reaching = tl.where(x[None, :] >= pivots[:, None], reaching + weight[None, :], reaching)
    tl.store(partial + (row * parts + part) * _PIVOTS + pivot, tl.sum(reaching, 1))
    tl.debug_barrier()  # all threads have stored before one tells
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") < parts - 1:
        return
    tl.store(arrived + row, 0)
    each = tl.arange(0, PARTS)[:, None]
    at = partial + (row * parts + each) * _PIVOTS + pivot[None, :]
    reached = tl.sum(tl.load(at, mask=each < parts, other=0.0, cache_modifier=".cg"), 0)
    if FIRST:
        total = tl.sum(tl.where(pivot == _PIVOTS - 1, reached, 0.0), 0)
        # The best token is kept in any case.
        target = tl.where(k > 0, k.to(tl.float32), tl.maximum(share * total, 1.0))
        sum_low, sum_high = float("inf"), 0.0
        tl.store(bounds + _TARGET, target)
    else:
        target = tl.load(bounds + _TARGET)
        sum_low, sum_high = tl.load(bounds + _SUM_LOW), tl.load(bounds + _SUM_HIGH)
    enough = reached >= target
    low = tl.maximum(low, tl.max(tl.where(enough, pivots, float("-inf")), 0))
    high = tl.minimum(high, tl.min(tl.where(enough, float("inf"), pivots), 0))
    sum_low = tl.minimum(sum_low, tl.min(tl.where(enough, reached, float("inf")), 0))
    sum_high = tl.maximum(sum_high, tl.max(tl.where(enough, 0.0, reached), 0))
    # Where top-p follows top-k, all that are higher are listed. None has less than the lowest mass.
    listed = tl.where((k > 0) & (share < 1.0), sum_low, sum_low - sum_high)
    limit = LIMIT * tl.where(k > 0, 1.0, _mass(low, best, scale))
    tl.store(bounds + _LOW, low)
    tl.store(bounds + _HIGH, high)
    tl.store(bounds + _SUM_LOW, sum_low)
    tl.store(bounds + _SUM_HIGH, sum_high)
    tl.store(bounds + _OPEN, ((listed >= limit) & (low < tl.minimum(high, best))).to(tl.float32))


@triton.jit
def _listed_range(bounds: tl.tensor, slot: tl.tensor) -> tl.tensor:
    """The logits that are listed: for top-p after top-k, all that may be kept."""
    high = tl.load(bounds + _HIGH)
    both = (count_in(slot + TOP_K) > 0) & (number_in(slot + TOP_P) < 1.0)
    return tl.load(bounds + _LOW), tl.where(both, float("inf"), high)


@direct
@triton.jit
def _gather(
    table: tl.tensor,
    slots: tl.tensor,
    logits: tl.tensor,
    maxima: tl.tensor,
    ranges: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    lists: tl.tensor,
    vocab: tl.tensor,
    LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Sum the masses of a block above the row's range, and list the logits in the range if they
    fit."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot, at = slot_of(table, slots), row * blocks + block
    best = _maximum(maxima, vocab, BLOCK, BLOCKS)
    if not (is_filtered(slots, slot) & (tl.abs(best) < float("inf"))):
        return
    low, high = _listed_range(ranges + row * _RANGE, slot)
    # Columns are counted together, so that few numbers are added up across threads.
    line, column = tl.arange(0, BLOCK // WIDTH), tl.arange(0, WIDTH)
    token = block * BLOCK + line[:, None] * WIDTH + column[None, :]
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
    above = tl.where(x >= high, _mass(x, best, number_in(slot + SCALE)), 0.0)
    tl.store(sums + at, tl.sum(tl.sum(above, 0), 0))
    inside = (x >= low) & (x < high)
    ones = inside.to(tl.int32)
    in_column = tl.sum(ones, 0)
    count = tl.sum(in_column, 0)
    tl.store(counts + at, count)
    if (count > 0) & (count <= LIMIT):
        first = tl.cumsum(in_column, 0) - in_column
        place = first[None, :] + tl.cumsum(ones, 0) - ones
        tl.store(lists + at * LIMIT + place, x, mask=inside)


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """An integer in the order of the numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key: tl.tensor) -> tl.tensor:
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _listed(
    lists: tl.tensor,
    counts: tl.tensor,
    start: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Some logits of every list; -inf for those out of the range."""
    place = start + tl.arange(0, WIDTH)[None, :]
    mask = place < counts[:, None]
    x = tl.load(lists[:, None] + place, mask=mask, other=float("-inf"))
    return tl.where((x >= low) & (x < high), x, float("-inf"))


@triton.jit
def _search(
    lists: tl.tensor,
    counts: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    best: tl.tensor,
    scale: tl.tensor,
    above: tl.tensor,
    target: tl.tensor,
    BY_MASS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """The highest logit in a range that reaches the target together with all that are not lower, by
    their mass or their number; the lowest one if none does, and ``low`` if there is none."""
    longest = tl.max(counts, 0)
    lowest = tl.full((BLOCKS, WIDTH), float("inf"), tl.float32)
    highest = tl.full((BLOCKS, WIDTH), float("-inf"), tl.float32)
    for start in range(0, longest, WIDTH):
        x = _listed(lists, counts, start, low, high, WIDTH)
        lowest = tl.minimum(lowest, tl.where(x >= low, x, float("inf")))
        highest = tl.maximum(highest, x)
    least, greatest = tl.min(tl.min(lowest, 1), 0), tl.max(tl.max(highest, 1), 0)
    key, end = _key(least), _key(greatest) + 1
    while end - key > 1:
        middle = key + (end - key) // 2
        reaching = tl.zeros((BLOCKS, WIDTH), tl.float32)
        for start in range(0, longest, WIDTH):
            x = _listed(lists, counts, start, low, high, WIDTH)
            weight = _mass(x, best, scale) if BY_MASS else 1.0
            reaching = tl.where(x >= _value(middle), reaching + weight, reaching)
        enough = above + tl.sum(tl.sum(reaching, 1), 0) >= target
        key = tl.where(enough, middle, key)
        end = tl.where(enough, end, middle)
    return tl.where(greatest >= least, _value(key), low)


@triton.jit
def _kept_masses(
    lists: tl.tensor,
    counts: tl.tensor,
    floor: tl.tensor,
    high: tl.tensor,
    best: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """The mass of each list from the floor to the end of the range."""
    mass = tl.zeros((BLOCKS, WIDTH), tl.float32)
    for start in range(0, tl.max(counts, 0), WIDTH):
        mass += _mass(_listed(lists, counts, start, floor, high, WIDTH), best, scale)
    return tl.sum(mass, 1)


@triton.jit
def find_floor(
    slot: tl.tensor,
    logits: tl.tensor,
    best: tl.tensor,
    ranges: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    lists: tl.tensor,
    vocab: tl.tensor,
    LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """The floor of this row: the highest of min-p's, top-k's, and that of top-p among what these
    keep; and the masses of its blocks without what is below, relative to the row's best."""
    row = tl.program_id(0).to(tl.int64)
    scale, k, share = number_in(slot + SCALE), count_in(slot + TOP_K), number_in(slot + TOP_P)
    bounds = ranges + row * _RANGE
    low, high = _listed_range(bounds, slot)
    block, blocks = tl.arange(0, BLOCKS), tl.cdiv(vocab, BLOCK)
    at, there = row * blocks + block, block < blocks
    count = tl.load(counts + at, mask=there, other=0)
    fits = tl.max(count, 0) <= LIMIT
    # Lists that are too long are blocks of the row itself.
    count = tl.where(fits, count, tl.minimum(tl.maximum(vocab - block * BLOCK, 0), BLOCK))
    lists_B = lists + at * LIMIT
    blocks_B = logits + row * vocab + block * BLOCK
    lists_B = tl.where(fits, lists_B.to(tl.int64), blocks_B.to(tl.int64))
    lists_B = lists_B.to(tl.pointer_type(tl.float32))
    above = tl.load(sums + at, mask=there, other=0.0)
    floor = low
    if k > 0:
        higher = tl.where(share < 1.0, 0.0, tl.load(bounds + _SUM_HIGH))
        floor = _search(
            lists_B, count, low, high, best, scale, higher, k.to(tl.float32), False, WIDTH, BLOCKS
        )
    if share < 1.0:
        target = tl.load(bounds + _TARGET)
        if k > 0:
            total = tl.sum(_kept_masses(lists_B, count, floor, high, best, scale, WIDTH, BLOCKS), 0)
            target = tl.maximum(share * total, 1.0)
        floor = _search(
            lists_B, count, floor, high, best, scale, tl.sum(above, 0), target, True, WIDTH, BLOCKS
        )
    kept = _kept_masses(lists_B, count, floor, high, best, scale, WIDTH, BLOCKS)
    return floor, tl.where(there, above + kept, 0.0)
