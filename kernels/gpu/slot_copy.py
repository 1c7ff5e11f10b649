"""Triton copies between any slots of a cache and consecutive rows, for the handoff.

    cache [K, N, W]   slots [T]   rows [K, T, W]   in words of four bytes

A program copies some tokens of a head, sixteen bytes at a time. Each byte is read once and written
once; torch would index element by element into a temporary first.

K heads, N slots of the cache, T tokens, W words of a token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Bytes that a thread reads at a time. Rows of other sizes are left to torch.
VECTOR_BYTES = 16
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
    cache_KND: torch.Tensor, slots_T: torch.Tensor, rows_KTD: torch.Tensor, *, scatter: bool
) -> None:
    """``rows[:] = cache[:, slots]``, or with ``scatter`` the reverse. The caller has checked that
    the slots exist."""
    cached, rows = (_words(each) for each in (cache_KND, rows_KTD))
    heads, count, words = rows.shape
    assert cached.shape == (heads, cached.shape[1], words) and slots_T.shape == (count,)
    assert slots_T.dtype == torch.int64 and slots_T.is_contiguous()
    if not count:
        return
    fixed = constants(words, scatter=scatter)
    _copy[(triton.cdiv(count, fixed["TOKENS"]), heads)](
        cached, slots_T, rows, cached.shape[1], count, **fixed, **OPTIONS
    )


def takes(x: torch.Tensor) -> bool:
    """True if this memory can be copied in whole vectors."""
    row = x.shape[2] * x.element_size()
    return x.is_contiguous() and row % VECTOR_BYTES == 0 and x.data_ptr() % VECTOR_BYTES == 0


def _words(x: torch.Tensor) -> torch.Tensor:
    assert takes(x), (x.shape, x.stride(), x.dtype)
    return x.view(torch.uint8).view(torch.int32)


@triton.jit(
    do_not_specialize=["cache_slots", "count"],
    do_not_specialize_on_alignment=["slots_T"],  # they may be a slice
)
def _copy(
    cache_KNW: tl.tensor,
    slots_T: tl.tensor,
    rows_KTW: tl.tensor,
    cache_slots: tl.tensor,
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
    cached = cache_KNW + (head * cache_slots + slot)[:, None] * WORDS + word[None, :]
    row = rows_KTW + (head * count + token)[:, None] * WORDS + word[None, :]
    if SCATTER:
        tl.store(cached, tl.load(row, mask=there), mask=there)
    else:
        tl.store(row, tl.load(cached, mask=there), mask=there)
