"""Triton kernels that draw a token for each row of logits.

    table [S, COLUMNS]   slots [R]   logits [R, V]   ->   tokens [R]

Everything about a sequence is in its row of the table, its slot: parameters, the number of tokens
drawn so far, and the addresses of lists that few have. So nothing about a step comes from the
host, and a row that does not use a filter leaves its kernel at once. Slot -1 is padding.

A draw is that of ``shared/engine/rank/sampler.py``: the inverse of the cumulative distribution at
splitmix64 of the seed and the number of the output. Filters are thresholds on logits, the *floors*.
Sums are taken by blocks of V in a fixed order, so a draw does not depend on its batch.

    edit     applies biases, penalties and restrictions
    measure  finds the maximum of each block, and its mass
    narrow   sums what reaches some pivots, which leaves a smaller range to the floor; several times
    gather   lists the logits of this range, and sums those above it
    keep     finds the floor among those listed, and the masses of blocks without what is below it
    draw     chooses a block by these, and a token in it

R rows, S slots, V vocabulary, B blocks of a row, P parts of it, N pivots. A token's mass is its
probability divided by that of the row's best token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, direct, next_power_of_2

# Columns of the table. Numbers are stored as the bits of float64, lists as the addresses of int32.
COLUMNS = tl.constexpr(24)
STREAM = tl.constexpr(0)  # the hash of the seed
INDEX = tl.constexpr(1)  # tokens drawn so far
SCALE = tl.constexpr(2)  # log2(e) / temperature; 0: take the best token
TOP_K = tl.constexpr(3)  # 0: all
TOP_P = tl.constexpr(4)
SPAN = tl.constexpr(5)  # min_p as a difference from the best logit, at most 0; -inf: all
EDITED = tl.constexpr(6)  # 1 if one of the columns below is used, but for the mask
REPETITION = tl.constexpr(7)
PRESENCE = tl.constexpr(8)
FREQUENCY = tl.constexpr(9)
COUNTS = tl.constexpr(10)  # [V]: twice the number of times drawn, plus 1 if in the prompt
BIASES = tl.constexpr(11)  # token ids, then the bits of a float32 for each
BIAS_COUNT = tl.constexpr(12)
BLOCKED = tl.constexpr(13)  # token ids that are not among the first BLOCKED_UNTIL outputs
BLOCKED_COUNT = tl.constexpr(14)
BLOCKED_UNTIL = tl.constexpr(15)
WORDS = tl.constexpr(16)  # bad words [words, 1 + PREFIX]: from the last token on, -1 behind
WORD_COUNT = tl.constexpr(17)
PREFIX = tl.constexpr(18)
RECENT = tl.constexpr(19)  # the last PREFIX outputs: output i is at i modulo PREFIX
ALLOWED = tl.constexpr(20)  # a bit for each token, from the lowest bit of the first word
ALLOWED_IDS = tl.constexpr(21)  # the same as ids, if there are bad words too
ALLOWED_COUNT = tl.constexpr(22)
MASK = tl.constexpr(23)  # the grammar's bits for the next draw

# Tokens of a block; those that a program edits, and the items of a list that it reads at a time.
BLOCK = 4096
EDITED_BLOCK = 1024
ITEMS = 128
# Tokens of a part, which one program compares with pivots, TILE at a time.
PART = 16384
TILE = 1024
STAGES = 4
# Times that a range is narrowed, at most.
PASSES = 3
# Logits of a block that are listed. If a range has more in the end, the row itself is searched.
LIMIT = 1024
# Listed tokens that a block compares at a time.
LISTED = 64

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
_FARTHEST = tl.constexpr(150.0)
# Allowed by a grammar, but forbidden otherwise: drawn if nothing else may be.
_LAST_RESORT = tl.constexpr(-1e30)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


def set_columns(table_SC: torch.Tensor, changes_N2: torch.Tensor) -> None:
    """``table.flatten()[index] = value`` for pairs (index, value), int64."""
    assert table_SC.dtype == changes_N2.dtype == torch.int64 and changes_N2.is_contiguous()
    count = len(changes_N2)
    _set[(cdiv(count, ITEMS),)](table_SC, changes_N2, count, ITEMS=ITEMS, num_warps=4)


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
        grid = rows, cdiv(vocab, EDITED_BLOCK)
        _edit[grid](*state, vocab, BLOCK=EDITED_BLOCK, ITEMS=ITEMS, **_OPTIONS)
    measured = (*stats, firsts_RB, floors_R, distances_RB, squares_RB, arrived_R)
    _measure[(rows, blocks)](*state, *measured, vocab, BLOCK=BLOCK, FILTERED=filtered, **_OPTIONS)
    if filtered:
        moments = (sums_RB, distances_RB, squares_RB)
        _find_floors(*state, maxima_RB, moments, floors_R, arrived_R, sizes)
    drawn = (tokens_R, last_tokens_S)
    _draw[(rows,)](*state, *stats, firsts_RB, floors_R, *drawn, vocab, **sizes, **_OPTIONS)
    return tokens_R


def _find_floors(
    table_SC: torch.Tensor,
    slots_R: torch.Tensor,
    logits_RV: torch.Tensor,
    maxima_RB: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    floors_R: torch.Tensor,
    arrived_R: torch.Tensor,
    sizes: dict[str, int],
) -> None:
    """The floors of rows with filters, and the masses of their blocks relative to the row's best,
    without what is below."""
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
    keep = {"LIMIT": LIMIT, "WIDTH": LISTED, **sizes}
    _keep[(rows,)](*state, *listed, floors_R, vocab, **keep, num_warps=16)


@direct
@triton.jit(do_not_specialize=["count"])
def _set(table: tl.tensor, changes: tl.tensor, count: tl.tensor, ITEMS: tl.constexpr) -> None:
    """Write some columns."""
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    there = item < count
    index = tl.load(changes + 2 * item, mask=there, other=0)
    tl.store(table + index, tl.load(changes + 2 * item + 1, mask=there), mask=there)


# ---- the table -----------------------------------------------------------------------------------


@triton.jit
def _slot(table: tl.tensor, slots: tl.tensor) -> tl.tensor:
    """The columns of this row's slot. The first one's for padding, which the caller leaves out."""
    return table + tl.maximum(tl.load(slots + tl.program_id(0)), 0).to(tl.int64) * COLUMNS


@triton.jit
def _number(column: tl.tensor) -> tl.tensor:
    return tl.load(column).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _count(column: tl.tensor) -> tl.tensor:
    return tl.load(column).to(tl.int32)


@triton.jit
def _list(column: tl.tensor) -> tl.tensor:
    return tl.load(column).to(tl.pointer_type(tl.int32))


# ---- edits ---------------------------------------------------------------------------------------


@direct
@triton.jit
def _edit(
    table: tl.tensor,
    slots: tl.tensor,
    logits: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
) -> None:
    """Edit a block; NaN if it is not finite, since edited logits may be -inf."""
    if tl.load(slots + tl.program_id(0)) < 0:
        return
    slot = _slot(table, slots)
    masked, edited = tl.load(slot + MASK) != 0, tl.load(slot + EDITED) != 0
    if not (masked | edited):
        return
    logits += tl.program_id(0).to(tl.int64) * vocab
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(logits + token, mask=inside, other=0.0)
    wrong = tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32), 0)
    if edited:
        _edit_listed(slot, logits, tl.program_id(1) * BLOCK, BLOCK, ITEMS)
        x = tl.load(logits + token, mask=inside, other=0.0)
        x = _edited(slot, x, token, inside)
    if masked:
        allowed = _bits(slot + MASK, token, inside)
        x = tl.where(allowed, tl.maximum(x, _LAST_RESORT), float("-inf"))
    tl.store(logits + token, tl.where(wrong > 0, float("nan"), x), mask=inside)


@triton.jit
def _edit_listed(
    slot: tl.tensor,
    logits: tl.tensor,
    first: tl.tensor,
    BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
) -> None:
    """Apply lists of tokens to a block in memory, where only this program reads and writes it."""
    tl.debug_barrier()  # other threads have read it
    count, ids = _count(slot + BIAS_COUNT), _list(slot + BIASES)
    for start in range(0, count, ITEMS):
        item = start + tl.arange(0, ITEMS)
        id = tl.load(ids + item, mask=item < count, other=-1)
        here = (id >= first) & (id < first + BLOCK)
        bias = tl.load(ids + count + item, mask=here, other=0).to(tl.float32, bitcast=True)
        tl.store(logits + id, tl.load(logits + id, mask=here, other=0.0) + bias, mask=here)
    tl.debug_barrier()  # a forbidden token may have a bias
    count, ids = _count(slot + BLOCKED_COUNT), _list(slot + BLOCKED)
    if tl.load(slot + INDEX) < tl.load(slot + BLOCKED_UNTIL):
        for start in range(0, count, ITEMS):
            item = start + tl.arange(0, ITEMS)
            id = tl.load(ids + item, mask=item < count, other=-1)
            tl.store(logits + id, float("-inf"), mask=(id >= first) & (id < first + BLOCK))
    words = _count(slot + WORD_COUNT)
    if words > 0:
        words = tl.where(_leaves_nothing(slot, ITEMS), 0, words)
        for start in range(0, words, ITEMS):
            id = _completing(slot, start, ITEMS)
            tl.store(logits + id, float("-inf"), mask=(id >= first) & (id < first + BLOCK))
    tl.debug_barrier()


@triton.jit
def _completing(slot: tl.tensor, start: tl.tensor, ITEMS: tl.constexpr) -> tl.tensor:
    """The last tokens of some bad words, where only these are missing; -1 for the others."""
    prefix, recent = _count(slot + PREFIX), _list(slot + RECENT)
    word = start + tl.arange(0, ITEMS)
    there = word < _count(slot + WORD_COUNT)
    at = _list(slot + WORDS) + word * (1 + prefix)
    last = tl.load(at, mask=there, other=-1)
    drawn = _count(slot + INDEX)
    for back in range(1, prefix + 1):
        expected = tl.load(at + back, mask=there, other=-1)
        recent_token = tl.load(recent + tl.maximum(drawn - back, 0) % prefix)
        matches = (expected < 0) | ((expected == recent_token) & (drawn >= back))
        last = tl.where(matches, last, -1)
    return last


@triton.jit
def _leaves_nothing(slot: tl.tensor, ITEMS: tl.constexpr) -> tl.tensor:
    """True if each of the only tokens that are allowed would complete a bad word."""
    count, ids = _count(slot + ALLOWED_COUNT), _list(slot + ALLOWED_IDS)
    number = 0
    completes = 1
    while (number < count) & (completes > 0):
        token = tl.load(ids + number)
        completes = 0
        for start in range(0, _count(slot + WORD_COUNT), ITEMS):
            completes += tl.sum((_completing(slot, start, ITEMS) == token).to(tl.int32), 0)
        number += tl.minimum(completes, 1)
    return (count > 0) & (number == count)


@triton.jit
def _edited(slot: tl.tensor, x: tl.tensor, token: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Apply penalties, and what is known of every token."""
    if tl.load(slot + COUNTS) != 0:
        token_count = tl.load(_list(slot + COUNTS) + token, mask=inside, other=0)
        factor = _number(slot + REPETITION)
        weaker = tl.where(x > 0, x / factor, x * factor)
        x = tl.where(token_count > 0, weaker, x)
        drawn = (token_count >> 1).to(tl.float32)
        presence = tl.where(drawn > 0, _number(slot + PRESENCE), 0.0)
        x -= _number(slot + FREQUENCY) * drawn + presence
    if tl.load(slot + ALLOWED) != 0:
        x = tl.where(_bits(slot + ALLOWED, token, inside), x, float("-inf"))
    return x


@triton.jit
def _bits(column: tl.tensor, token: tl.tensor, inside: tl.tensor) -> tl.tensor:
    words = tl.load(_list(column) + (token >> 5), mask=inside, other=0)
    return ((words >> (token & 31)) & 1) != 0


# ---- blocks --------------------------------------------------------------------------------------


@triton.jit
def _mass(x: tl.tensor, best: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return tl.exp2((x - best) * scale)


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
    slot = _slot(table, slots)
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
    scale = _number(slot + SCALE)
    if scale == 0:
        tl.store(firsts + at, tl.min(tl.where(x == best, token, vocab), 0))
    elif tl.abs(best) < float("inf"):
        above = (x - best) * scale
        mass = tl.exp2(above)
        tl.store(sums + at, tl.sum(mass, 0))
        if FILTERED:
            distance = tl.minimum(-above, _FARTHEST)  # a number also without a mass
            tl.store(distances + at, tl.sum(mass * distance, 0))
            tl.store(squares + at, tl.sum(mass * distance * distance, 0))


# ---- filters -------------------------------------------------------------------------------------


@triton.jit
def _filtered(slots: tl.tensor, slot: tl.tensor) -> tl.tensor:
    """True unless this row keeps all tokens, takes the best one, or is padding."""
    some = (_count(slot + TOP_K) > 0) | (_number(slot + TOP_P) < 1.0)
    some |= _number(slot + SPAN) > float("-inf")
    return some & (_number(slot + SCALE) > 0) & (tl.load(slots + tl.program_id(0)) >= 0)


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
    """The lowest logit that min-p keeps, if it has a mass at all."""
    return tl.maximum(best + _number(slot + SPAN), best - _FARTHEST / scale)


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
    farther = tl.where(there, tl.minimum((best - highest) * scale, _FARTHEST), 0.0)
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
    slot, bounds = _slot(table, slots), ranges + row * _RANGE
    if not FIRST:  # noqa: SIM102  # decided when it is compiled
        if tl.load(bounds + _OPEN) == 0.0:
            return
    best = _maximum(maxima, vocab, BLOCK, BLOCKS)
    if not (_filtered(slots, slot) & (tl.abs(best) < float("inf"))):
        return
    scale, k, share = _number(slot + SCALE), _count(slot + TOP_K), _number(slot + TOP_P)
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
    both = (_count(slot + TOP_K) > 0) & (_number(slot + TOP_P) < 1.0)
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
    slot, at = _slot(table, slots), row * blocks + block
    best = _maximum(maxima, vocab, BLOCK, BLOCKS)
    if not (_filtered(slots, slot) & (tl.abs(best) < float("inf"))):
        return
    low, high = _listed_range(ranges + row * _RANGE, slot)
    # Columns are counted together, so that few numbers are added up across threads.
    line, column = tl.arange(0, BLOCK // WIDTH), tl.arange(0, WIDTH)
    token = block * BLOCK + line[:, None] * WIDTH + column[None, :]
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
    above = tl.where(x >= high, _mass(x, best, _number(slot + SCALE)), 0.0)
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


@direct
@triton.jit
def _keep(
    table: tl.tensor,
    slots: tl.tensor,
    logits: tl.tensor,
    maxima: tl.tensor,
    ranges: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    lists: tl.tensor,
    floors: tl.tensor,
    vocab: tl.tensor,
    LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """The floor of a row: the highest of min-p's, top-k's, and that of top-p among what these keep;
    and the masses of its blocks without what is below."""
    row, slot = tl.program_id(0).to(tl.int64), _slot(table, slots)
    best = _maximum(maxima, vocab, BLOCK, BLOCKS)
    if not (_filtered(slots, slot) & (tl.abs(best) < float("inf"))):
        return
    scale, k, share = _number(slot + SCALE), _count(slot + TOP_K), _number(slot + TOP_P)
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
    tl.store(sums + at, above + kept, mask=there)
    tl.store(floors + row, floor)


# ---- draws ---------------------------------------------------------------------------------------


@triton.jit
def _kept(x: tl.tensor, floor: tl.tensor, best: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Masses relative to a block's best, 0 below the floor."""
    below = x - tl.maximum(best, _LAST_RESORT)  # a number even if all of the block is blocked
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
    slot, scale = _slot(table, slots), _number(_slot(table, slots) + SCALE)
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
            drawn = _list(slot + COUNTS) + token
            tl.store(drawn, tl.load(drawn) + 2)
        prefix = tl.load(slot + PREFIX)
        if prefix > 0:
            tl.store(_list(slot + RECENT) + index % prefix, token)
