"""Triton kernels that draw a token for each row of logits.

    table [S, COLUMNS]   slots [R]   logits [R, V]   ->   tokens [R]

Everything about a sequence is in its row of the table, its slot: parameters, the number of tokens
drawn so far, and the addresses of lists that few have. So nothing about a step comes from the
host, and a row that does not use a filter leaves its kernel at once. Slot -1 is padding.

A draw is that of ``shared/engine/rank/sampler.py``: the inverse of the cumulative distribution at
splitmix64 of the seed and the number of the output. Filters are thresholds on logits, the *floors*.
Sums are taken by blocks of V in a fixed order, so a draw does not depend on its batch.

    edit       applies biases, penalties and restrictions
    measure    finds the maximum of each block, and its mass
    histogram  counts logits by their distance from the row's maximum
    keep       finds the floor of min-p, top-k and top-p: few bins of the histogram may contain it,
               and what is in these is searched exactly
    weigh      finds the masses of blocks again, without what is below the floor
    draw       chooses a block by these, and a token in it

R rows, S slots, V vocabulary, B blocks of a row, H bins. A token's mass is its probability divided
by that of the row's best token; y is its distance to that one, -log2(mass), plus ``_NEAREST``.
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
# Blocks that a program of the histogram counts.
TILES = 4
# Tokens at a time where one program reads a row, and where it compares them with pivots.
TILE = 4096
PIVOT_TILE = 1024
# Logits that are gathered to be searched. If more are in the bins, the row itself is read again.
CAPACITY = 32768

_OPTIONS = {"num_warps": 8}
# Bins are equal steps of y's bits, 256 for each doubling: of 1.1 % of the mass, and coarser where
# no mass is. Triton 3.6 counts by votes of a warp, which takes longer the more bins there are.
_BINS = tl.constexpr(512 if triton.__version__.startswith("3.6.") else 2048)
_BIN_BITS = tl.constexpr(17 if triton.__version__.startswith("3.6.") else 15)
_NEAREST = tl.constexpr(4.0)
_NEAREST_BITS = tl.constexpr(0x40800000)
# How much more than rounding the histogram's masses are off.
_SLACK = tl.constexpr(1e-4)
_PIVOTS = tl.constexpr(4)
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
    tokens_R = torch.empty_like(slots_R)
    if not rows:
        return tokens_R
    blocks = cdiv(vocab, BLOCK)
    sizes = {"BLOCK": BLOCK, "BLOCKS": next_power_of_2(blocks)}
    # Each on its own, so that all are aligned alike.
    maxima_RB, sums_RB = (logits_RV.new_empty(rows, blocks) for _ in range(2))
    firsts_RB = slots_R.new_empty(rows, blocks)
    floors_R = logits_RV.new_empty(rows)
    bins_RH = slots_R.new_empty(rows if filtered else 0, _BINS.value)
    state, stats = (table_SC, slots_R, logits_RV), (maxima_RB, sums_RB)
    if edited:
        grid = rows, cdiv(vocab, EDITED_BLOCK)
        _edit[grid](*state, vocab, BLOCK=EDITED_BLOCK, ITEMS=ITEMS, **_OPTIONS)
    measured = (*stats, firsts_RB, floors_R, bins_RH)
    _measure[(rows, blocks)](*state, *measured, vocab, BLOCK=BLOCK, FILTERED=filtered, **_OPTIONS)
    if filtered:
        _histogram[(rows, cdiv(blocks, TILES))](
            *state, maxima_RB, bins_RH, vocab, TILES=TILES, **sizes, **_OPTIONS
        )
        lists_RN = logits_RV.new_empty(rows, CAPACITY)
        search = {"TILE": TILE, "PIVOT_TILE": PIVOT_TILE, "CAPACITY": CAPACITY}
        _keep[(rows,)](
            *state, *stats, floors_R, bins_RH, lists_RN, vocab, **search, **sizes, num_warps=16
        )
        _weigh[(rows, blocks)](*state, *stats, floors_R, vocab, BLOCK=BLOCK, **_OPTIONS)
    drawn = (tokens_R, last_tokens_S)
    _draw[(rows,)](*state, *stats, firsts_RB, floors_R, *drawn, vocab, **sizes, **_OPTIONS)
    return tokens_R


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
        seen = tl.load(recent + tl.maximum(drawn - back, 0) % prefix)
        matches = (expected < 0) | ((expected == seen) & (drawn >= back))
        last = tl.where(matches, last, -1)
    return last


@triton.jit
def _leaves_nothing(slot: tl.tensor, ITEMS: tl.constexpr) -> tl.tensor:
    """True if each of the only tokens that are allowed would complete a bad word."""
    count, ids = _count(slot + ALLOWED_COUNT), _list(slot + ALLOWED_IDS)
    number = 0
    found = 1
    while (number < count) & (found > 0):
        token = tl.load(ids + number)
        found = 0
        for start in range(0, _count(slot + WORD_COUNT), ITEMS):
            found += tl.sum((_completing(slot, start, ITEMS) == token).to(tl.int32), 0)
        number += tl.minimum(found, 1)
    return (count > 0) & (number == count)


@triton.jit
def _edited(slot: tl.tensor, x: tl.tensor, token: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Apply penalties, and what is known of every token."""
    if tl.load(slot + COUNTS) != 0:
        seen = tl.load(_list(slot + COUNTS) + token, mask=inside, other=0)
        factor = _number(slot + REPETITION)
        weaker = tl.where(x > 0, x / factor, x * factor)
        x = tl.where(seen > 0, weaker, x)
        drawn = (seen >> 1).to(tl.float32)
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
    bins: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
) -> None:
    """The maximum of a block, inf if it is not finite. For a row that takes the best token, the
    first one that has it; for others the block's mass relative to it. Clears what the next kernels
    fill."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(slots + row) < 0:
        return
    slot = _slot(table, slots)
    if block == 0:
        tl.store(floors + row, float("-inf"))
        if FILTERED:
            bin = tl.arange(0, _BINS)
            tl.store(bins + row * _BINS + bin, tl.zeros_like(bin))
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
        tl.store(sums + at, tl.sum(tl.exp2((x - best) * scale), 0))


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
def _distance(x: tl.tensor, best: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return (best - x) * scale + _NEAREST


@triton.jit
def _mass(y: tl.tensor) -> tl.tensor:
    return tl.exp2(-(y - _NEAREST))


@triton.jit
def _edge(bin: tl.tensor) -> tl.tensor:
    """The y at which a bin begins. The last one has no end."""
    y = ((bin << _BIN_BITS) + _NEAREST_BITS).to(tl.float32, bitcast=True)
    return tl.where(bin < _BINS, y, float("inf"))


@direct
@triton.jit
def _histogram(
    table: tl.tensor,
    slots: tl.tensor,
    logits: tl.tensor,
    maxima: tl.tensor,
    bins: tl.tensor,
    vocab: tl.tensor,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Count the logits of some blocks by their distance from the best."""
    row, slot = tl.program_id(0).to(tl.int64), _slot(table, slots)
    best = _maximum(maxima, vocab, BLOCK, BLOCKS)
    if not (_filtered(slots, slot) & (tl.abs(best) < float("inf"))):
        return
    scale = _number(slot + SCALE)
    counts = tl.zeros((_BINS,), tl.int32)
    for tile in range(TILES):
        token = (tl.program_id(1) * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
        y = _distance(x, best, scale)
        bin = (y.to(tl.int32, bitcast=True) - _NEAREST_BITS) >> _BIN_BITS
        counts += tl.histogram(tl.minimum(bin, _BINS - 1), _BINS, mask=y < float("inf"))
    at = bins + row * _BINS + tl.arange(0, _BINS)
    tl.atomic_add(at, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _gather(
    logits: tl.tensor,
    vocab: tl.tensor,
    best: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    into: tl.tensor,
    fits: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Read a row: the mass of the tokens nearer than ``low``. Those from there to before ``high``
    are listed if they fit."""
    tl.debug_barrier()  # other threads have read an earlier list
    mass = tl.zeros((TILE,), tl.float32)
    listed = 0
    for start in range(0, vocab, TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        y = _distance(x, best, scale)
        mass += tl.where(y < low, _mass(y), 0.0)
        inside = (y >= low) & (y < high)
        found = tl.sum(inside.to(tl.int32), 0)
        if fits & (found > 0):
            place = listed + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(into + place, x, mask=inside)
            listed += found
    tl.debug_barrier()  # other threads read the list
    return tl.sum(mass, 0)


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
def _search(
    logits: tl.tensor,
    vocab: tl.tensor,
    best: tl.tensor,
    scale: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    counts: tl.tensor,
    target: tl.tensor,
    into: tl.tensor,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
    PIVOT_TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> tl.tensor:
    """The highest logit that reaches the target together with all that are not lower, by their mass
    or their number. It is in one of the bins ``first`` to ``last``, or all together do not reach
    it."""
    bin = tl.arange(0, _BINS)
    before = tl.sum(tl.where(bin < first, counts, 0), 0)
    inside = tl.sum(tl.where((bin >= first) & (bin <= last), counts, 0), 0)
    low, high = _edge(first), _edge(last + 1)
    # Distances may be rounded otherwise than where they were counted.
    fits = inside <= CAPACITY - TILE
    mass = _gather(logits, vocab, best, scale, low, high, into, fits, TILE)
    above = mass if BY_MASS else before.to(tl.float32)
    source = tl.where(fits, into.to(tl.int64), logits.to(tl.int64)).to(tl.pointer_type(tl.float32))
    length = tl.where(fits, inside, vocab)
    # A range of logits around these bins.
    margin = tl.abs(best) * 1e-5 + high * 1e-5 / scale
    key = _key(best - (high - _NEAREST) / scale - margin)
    end = tl.minimum(_key(best - (low - _NEAREST) / scale + margin), _key(best)) + 1
    while end - key > 1:
        step = (end - key + _PIVOTS) // (_PIVOTS + 1)
        pivot_keys = key + step * (1 + tl.arange(0, _PIVOTS))
        pivots = _value(tl.minimum(pivot_keys, end))
        sums = tl.zeros((PIVOT_TILE, _PIVOTS), tl.float32)
        for start in range(0, length, PIVOT_TILE):
            place = start + tl.arange(0, PIVOT_TILE)
            x = tl.load(source + place, mask=place < length, other=float("-inf"))
            y = _distance(x, best, scale)
            weight = _mass(y) if BY_MASS else tl.full((PIVOT_TILE,), 1.0, tl.float32)
            weight = tl.where((y >= low) & (y < high), weight, 0.0)
            sums += tl.where(x[:, None] >= pivots[None, :], weight[:, None], 0.0)
        enough = (above + tl.sum(sums, 0) >= target) & (pivot_keys < end)
        key += step * tl.sum(enough.to(tl.int32), 0)
        end = tl.minimum(end, key + step)
    return _value(key)


@direct
@triton.jit
def _keep(
    table: tl.tensor,
    slots: tl.tensor,
    logits: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    floors: tl.tensor,
    bins: tl.tensor,
    lists: tl.tensor,
    vocab: tl.tensor,
    TILE: tl.constexpr,
    PIVOT_TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """The floor of a row: the highest of min-p's, top-k's, and that of top-p among what these
    keep."""
    row, slot = tl.program_id(0).to(tl.int64), _slot(table, slots)
    best = _maximum(maxima, vocab, BLOCK, BLOCKS)
    if not (_filtered(slots, slot) & (tl.abs(best) < float("inf"))):
        return
    logits += row * vocab
    lists += row * CAPACITY
    scale = _number(slot + SCALE)
    bin = tl.arange(0, _BINS)
    counts = tl.load(bins + row * _BINS + bin)
    floor = best + _number(slot + SPAN)
    k = _count(slot + TOP_K)
    if k > 0:
        last = tl.minimum(tl.sum((tl.cumsum(counts, 0) < k).to(tl.int32), 0), _BINS - 1)
        threshold = _search(
            logits, vocab, best, scale, last, last, counts, k.to(tl.float32), lists,
            False, TILE, PIVOT_TILE, CAPACITY,
        )  # fmt: skip
        floor = tl.maximum(floor, threshold)
    share = _number(slot + TOP_P)
    if share < 1.0:
        if floor > float("-inf"):
            total = _mass_from(logits, vocab, floor, best, scale, TILE)
        else:
            block, blocks = tl.arange(0, BLOCKS), tl.cdiv(vocab, BLOCK)
            at = row * blocks + block
            total = tl.sum(_masses(maxima + at, sums + at, block < blocks, best, scale), 0)
        # The best token is kept in any case.
        target = tl.maximum(share * total, 1.0)
        most = tl.cumsum(counts * _mass(_edge(bin)), 0)
        least = tl.cumsum(counts * _mass(_edge(bin + 1)), 0)
        first = tl.sum((most < target * (1 - _SLACK)).to(tl.int32), 0)
        last = tl.sum((least < target * (1 + _SLACK)).to(tl.int32), 0)
        first, last = tl.minimum(first, _BINS - 1), tl.minimum(last, _BINS - 1)
        threshold = _search(
            logits, vocab, best, scale, first, last, counts, target, lists,
            True, TILE, PIVOT_TILE, CAPACITY,
        )  # fmt: skip
        floor = tl.maximum(floor, threshold)
    tl.store(floors + row, floor)


@triton.jit
def _mass_from(
    logits: tl.tensor,
    vocab: tl.tensor,
    floor: tl.tensor,
    best: tl.tensor,
    scale: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    mass = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocab, TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        mass += tl.where(x >= floor, _mass(_distance(x, best, scale)), 0.0)
    return tl.sum(mass, 0)


@direct
@triton.jit
def _weigh(
    table: tl.tensor,
    slots: tl.tensor,
    logits: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    floors: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The mass of a block relative to its best, without what is below the floor."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(slots + row) < 0:
        return
    floor = tl.load(floors + row)
    if floor == float("-inf"):
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
    at = row * tl.num_programs(1) + block
    best, scale = tl.load(maxima + at), _number(_slot(table, slots) + SCALE)
    tl.store(sums + at, tl.sum(_kept(x, floor, best, scale), 0))


# ---- draws ---------------------------------------------------------------------------------------


@triton.jit
def _kept(x: tl.tensor, floor: tl.tensor, best: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Masses relative to a block's best, 0 below the floor."""
    below = x - tl.maximum(best, _LAST_RESORT)  # a number even if all of the block is blocked
    return tl.where(x >= floor, tl.exp2(below * scale), 0.0)


@triton.jit
def _masses(
    maxima: tl.tensor, sums: tl.tensor, there: tl.tensor, best: tl.tensor, scale: tl.tensor
) -> tl.tensor:
    """The masses of blocks."""
    highest = tl.load(maxima, mask=there, other=float("-inf"))
    some = highest > float("-inf")
    return tl.where(
        some, tl.load(sums, mask=there & some, other=0.0) * tl.exp2((highest - best) * scale), 0.0
    )


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
        masses = _masses(maxima + at, sums + at, there, best, scale).to(tl.float64)
        upto = tl.cumsum(masses, 0)
        total = tl.max(upto, 0)
        point = _uniform(slot) * total
        chosen = _first_above(upto, total, point)
        before = tl.max(tl.where(block < chosen, upto, 0.0), 0)
        block_best = tl.load(maxima + row * blocks + chosen)
        inside = chosen * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + inside, mask=inside < vocab, other=float("-inf"))
        kept = _kept(x, tl.load(floors + row), block_best, scale).to(tl.float64)
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
