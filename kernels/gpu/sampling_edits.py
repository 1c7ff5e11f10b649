"""How Triton's draws edit logits: biases, penalties and restrictions."""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_table import (
    ALLOWED,
    ALLOWED_COUNT,
    ALLOWED_IDS,
    BIAS_COUNT,
    BIASES,
    BLOCKED,
    BLOCKED_COUNT,
    BLOCKED_UNTIL,
    COUNTS,
    EDITED,
    FREQUENCY,
    INDEX,
    MASK,
    PREFIX,
    PRESENCE,
    RECENT,
    REPETITION,
    WORD_COUNT,
    WORDS,
    allows,
    count_in,
    list_in,
    number_in,
)

# Tokens that are edited at a time, and items of a list.
EDITED_TILE = 1024
ITEMS = 128
# Allowed by a grammar, but forbidden otherwise: drawn if nothing else may be.
LAST_RESORT = tl.constexpr(-1e30)


@triton.jit
def edit_block(
    slot: tl.tensor,
    logits: tl.tensor,
    first: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ITEMS: tl.constexpr,
) -> None:
    """Edit a block of a row, from the token ``first`` on, in memory, where only this program reads
    and writes it."""
    masked, edited = tl.load(slot + MASK) != 0, tl.load(slot + EDITED) != 0
    tl.debug_barrier()  # other threads have read it
    if edited:
        _edit_listed(slot, logits, first, BLOCK, ITEMS)
    for start in range(first, tl.minimum(first + BLOCK, vocab), TILE):
        token = start + tl.arange(0, TILE)
        inside = token < vocab
        x = tl.load(logits + token, mask=inside, other=0.0)
        if edited:
            x = _edited(slot, x, token, inside)
        if masked:
            allowed = allows(slot + MASK, token, inside)
            x = tl.where(allowed, tl.maximum(x, LAST_RESORT), float("-inf"))
        tl.store(logits + token, x, mask=inside)
    tl.debug_barrier()


@triton.jit
def _edit_listed(
    slot: tl.tensor,
    logits: tl.tensor,
    first: tl.tensor,
    BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
) -> None:
    """Apply lists of tokens to a block."""
    count, ids = count_in(slot + BIAS_COUNT), list_in(slot + BIASES)
    for start in range(0, count, ITEMS):
        item = start + tl.arange(0, ITEMS)
        id = tl.load(ids + item, mask=item < count, other=-1)
        here = (id >= first) & (id < first + BLOCK)
        bias = tl.load(ids + count + item, mask=here, other=0).to(tl.float32, bitcast=True)
        tl.store(logits + id, tl.load(logits + id, mask=here, other=0.0) + bias, mask=here)
    tl.debug_barrier()  # a forbidden token may have a bias
    count, ids = count_in(slot + BLOCKED_COUNT), list_in(slot + BLOCKED)
    if tl.load(slot + INDEX) < tl.load(slot + BLOCKED_UNTIL):
        for start in range(0, count, ITEMS):
            item = start + tl.arange(0, ITEMS)
            id = tl.load(ids + item, mask=item < count, other=-1)
            tl.store(logits + id, float("-inf"), mask=(id >= first) & (id < first + BLOCK))
    words = count_in(slot + WORD_COUNT)
    if words > 0:
        words = tl.where(_leaves_nothing(slot, ITEMS), 0, words)
        for start in range(0, words, ITEMS):
            id = _completing(slot, start, ITEMS)
            tl.store(logits + id, float("-inf"), mask=(id >= first) & (id < first + BLOCK))
    tl.debug_barrier()


@triton.jit
def _completing(slot: tl.tensor, start: tl.tensor, ITEMS: tl.constexpr) -> tl.tensor:
    """The last tokens of some bad words, where only these are missing; -1 for the others."""
    prefix, recent = count_in(slot + PREFIX), list_in(slot + RECENT)
    word = start + tl.arange(0, ITEMS)
    there = word < count_in(slot + WORD_COUNT)
    at = list_in(slot + WORDS) + word * (1 + prefix)
    last = tl.load(at, mask=there, other=-1)
    drawn = count_in(slot + INDEX)
    for back in range(1, prefix + 1):
        expected = tl.load(at + back, mask=there, other=-1)
        recent_token = tl.load(recent + tl.maximum(drawn - back, 0) % prefix)
        matches = (expected < 0) | ((expected == recent_token) & (drawn >= back))
        last = tl.where(matches, last, -1)
    return last


@triton.jit
def _leaves_nothing(slot: tl.tensor, ITEMS: tl.constexpr) -> tl.tensor:
    """True if each of the only tokens that are allowed would complete a bad word."""
    count, ids = count_in(slot + ALLOWED_COUNT), list_in(slot + ALLOWED_IDS)
    number = 0
    completes = 1
    while (number < count) & (completes > 0):
        token = tl.load(ids + number)
        completes = 0
        for start in range(0, count_in(slot + WORD_COUNT), ITEMS):
            completes += tl.sum((_completing(slot, start, ITEMS) == token).to(tl.int32), 0)
        number += tl.minimum(completes, 1)
    return (count > 0) & (number == count)


@triton.jit
def _edited(slot: tl.tensor, x: tl.tensor, token: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Apply penalties, and what is known of every token."""
    if tl.load(slot + COUNTS) != 0:
        token_count = tl.load(list_in(slot + COUNTS) + token, mask=inside, other=0)
        factor = number_in(slot + REPETITION)
        weaker = tl.where(x > 0, x / factor, x * factor)
        x = tl.where(token_count > 0, weaker, x)
        drawn = (token_count >> 1).to(tl.float32)
        presence = tl.where(drawn > 0, number_in(slot + PRESENCE), 0.0)
        x -= number_in(slot + FREQUENCY) * drawn + presence
    if tl.load(slot + ALLOWED) != 0:
        x = tl.where(allows(slot + ALLOWED, token, inside), x, float("-inf"))
    return x
