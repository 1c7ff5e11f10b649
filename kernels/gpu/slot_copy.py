"""Triton copies between any slots of a cache and consecutive rows, for the handoff.

    held [K, N, W]   slots [T]   rows [K, T, W]   in words of four bytes

A program copies some tokens of a head, sixteen bytes at a time: each byte is read once and written
once, where torch would index element by element into a copy of its own first.

K heads, N slots of the cache, T tokens, W words of a token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# What a thread reads at a time; the rows of a cache that are no multiple of it are left to torch.
VECTOR_BYTES = 16
_WORD_BYTES = 4
# Words of a program: four vectors a thread are in flight.
_TILE = 2048
# Options of compilation.
OPTIONS = {"num_warps": 4}


def constants(words: int, *, scatter: bool) -> dict[str, Any]:
    """Compile-time constants of ``_copy``."""
    wide = triton.next_power_of_2(words)
    return {
        "WORDS": words,
        "WIDE": wide,
        "TOKENS": max(1, _TILE // wide),
        "SCATTER": scatter,
    }


def copy_slots(
    held_KND: torch.Tensor, slots_T: torch.Tensor, rows_KTD: torch.Tensor, *, scatter: bool
) -> None:
    """``rows[:] = held[:, slots]``, or with ``scatter`` the other way round. The caller has checked
    that the slots exist."""
    held, rows = (_words(each) for each in (held_KND, rows_KTD))
    heads, count, words = rows.shape
    assert held.shape == (heads, held.shape[1], words) and slots_T.shape == (count,)
    assert slots_T.dtype == torch.int64 and slots_T.is_contiguous()
    if not count:
        return
    fixed = constants(words, scatter=scatter)
    _copy[(triton.cdiv(count, fixed["TOKENS"]), heads)](
        held, slots_T, rows, held.shape[1], count, **fixed, **OPTIONS
    )


def takes(x: torch.Tensor) -> bool:
    """Return whether this memory can be copied in whole vectors."""
    row = x.shape[2] * x.element_size()
    return x.is_contiguous() and row % VECTOR_BYTES == 0 and x.data_ptr() % VECTOR_BYTES == 0


def _words(x: torch.Tensor) -> torch.Tensor:
    assert takes(x), (x.shape, x.stride(), x.dtype)
    return x.view(torch.uint8).view(torch.int32)


@triton.jit(
    do_not_specialize=["slots_held", "count"],
    do_not_specialize_on_alignment=["slots_T"],  # they may be a part of others
)
def _copy(
    held_KNW: tl.tensor,
    slots_T: tl.tensor,
    rows_KTW: tl.tensor,
    slots_held: tl.tensor,
    count: tl.tensor,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    SCATTER: tl.constexpr,
) -> None:
    """Copy some tokens of one head."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < count
    slot = tl.load(slots_T + token, mask=inside, other=0)
    word = tl.arange(0, WIDE)
    there = inside[:, None] & (word < WORDS)[None, :]
    held = held_KNW + (head * slots_held + slot)[:, None] * WORDS + word[None, :]
    row = rows_KTW + (head * count + token)[:, None] * WORDS + word[None, :]
    if SCATTER:
        tl.store(held, tl.load(row, mask=there), mask=there)
    else:
        tl.store(row, tl.load(held, mask=there), mask=there)
