"""The table of what a GPU knows about each sequence that draws, and how kernels read it.

A row is a slot. S slots, C columns, R rows of logits. Slot -1 is padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, direct

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

# Changes that a program writes.
_CHANGES = 128


def set_columns(table_SC: torch.Tensor, changes_N2: torch.Tensor) -> None:
    """``table.flatten()[index] = value`` for pairs (index, value), int64."""
    assert table_SC.dtype == changes_N2.dtype == torch.int64 and changes_N2.is_contiguous()
    count = len(changes_N2)
    _set[(cdiv(count, _CHANGES),)](table_SC, changes_N2, count, ITEMS=_CHANGES, num_warps=4)


@direct
@triton.jit(do_not_specialize=["count"])
def _set(table: tl.tensor, changes: tl.tensor, count: tl.tensor, ITEMS: tl.constexpr) -> None:
    """Write some columns."""
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    there = item < count
    index = tl.load(changes + 2 * item, mask=there, other=0)
    tl.store(table + index, tl.load(changes + 2 * item + 1, mask=there), mask=there)


@triton.jit
def slot_of(table: tl.tensor, slots: tl.tensor) -> tl.tensor:
    """The columns of this row's slot. The first one's for padding, which the caller leaves out."""
    return table + tl.maximum(tl.load(slots + tl.program_id(0)), 0).to(tl.int64) * COLUMNS


@triton.jit
def number_in(column: tl.tensor) -> tl.tensor:
    return tl.load(column).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def count_in(column: tl.tensor) -> tl.tensor:
    return tl.load(column).to(tl.int32)


@triton.jit
def list_in(column: tl.tensor) -> tl.tensor:
    return tl.load(column).to(tl.pointer_type(tl.int32))


@triton.jit
def allows(column: tl.tensor, token: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """The bits of tokens in the list of this column."""
    words = tl.load(list_in(column) + (token >> 5), mask=inside, other=0)
    return ((words >> (token & 31)) & 1) != 0
