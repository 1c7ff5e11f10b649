"""The rows of a step that decode, taken together where a GPU can: launching kernels for each
sequence and layer takes longer than all of their attention.

Triton compiles what does it on the machine that runs it, and needs a C compiler there and a folder
from which libraries can be loaded. So it is tried before it is relied on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch

from .reference import attention as reference
from .reference.attention import SequenceContext

log = logging.getLogger("tandem.kernels")


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decoding rows of a step, for all layers. ``table``, int32 [R, 2 + blocks], has of each
    its number in the step, its tokens of context, and the blocks that these are in."""

    table: torch.Tensor
    longest: int
    block_size: int


class PagedAttention(Protocol):
    """``reference.paged_attention``, or what computes the same."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        keys_KND: torch.Tensor,
        values_KND: torch.Tensor,
        contexts: Sequence[SequenceContext],
        window: int | None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


# What fills the decoding rows of its last argument, from queries, keys, values, rows and window.
DecodeKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, DecodeRows, int | None, torch.Tensor], None
]


def decode_rows(contexts: Sequence[SequenceContext], device: torch.device) -> DecodeRows | None:
    """Those of ``contexts`` that bring one row each; ``None`` if none does."""
    single = [context for context in contexts if context.count == 1]
    if not single:
        return None
    table = np.zeros((len(single), 2 + max(len(c.blocks) for c in single)), dtype=np.int32)
    for row, context in zip(table, single, strict=True):
        row[0], row[1] = context.rows.start, context.end
        row[2 : 2 + len(context.blocks)] = context.blocks
    longest = max(context.end for context in single)
    return DecodeRows(torch.from_numpy(table).to(device), longest, single[0].block_size)


def paged_attention(
    q_THD: torch.Tensor,
    keys_KND: torch.Tensor,
    values_KND: torch.Tensor,
    contexts: Sequence[SequenceContext],
    window: int | None,
    decodes: DecodeRows | None,
    kernel: DecodeKernel,
    other_rows: PagedAttention = reference.paged_attention,
) -> torch.Tensor:
    """``reference.paged_attention``, for the rows of ``decodes`` by one call of ``kernel``."""
    if decodes is None:
        return other_rows(q_THD, keys_KND, values_KND, contexts, window)
    out = q_THD.new_empty(q_THD.shape)  # in order, whatever q is
    kernel(q_THD, keys_KND, values_KND, decodes, window, out)
    chunks = [context for context in contexts if context.count > 1]
    if not chunks:
        return out
    return other_rows(q_THD, keys_KND, values_KND, chunks, window, out=out)


def triton_kernel(
    q_THD: torch.Tensor,
    keys_KND: torch.Tensor,
    values_KND: torch.Tensor,
    rows: DecodeRows,
    window: int | None,
    out_THD: torch.Tensor,
) -> None:
    """``paged_decode``; Triton is loaded by those alone that have rows for it."""
    from .gpu.paged_decode import paged_decode

    paged_decode(q_THD, keys_KND, values_KND, rows, window, out_THD)


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What the kernels are compiled for: one kind of attention on one rank."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    window: int | None
    block_size: int


class UnusableError(RuntimeError):
    """Triton's kernels cannot run on this GPU, or their results are wrong."""


def works(shape: DecodeShape, *, required: bool = False) -> bool:
    """Whether decoding rows can be taken together, and rightly; compiles what does it.

    Raises ``UnusableError`` if they cannot on a GPU and it is ``required``.
    """
    if shape.device.type != "cuda":
        return False
    reason = problem(shape)
    if reason and required:
        raise UnusableError(reason)
    if reason:
        log.warning("sequences decode one by one, because Triton cannot be used here: %s", reason)
    return not reason


@cache
def problem(shape: DecodeShape) -> str:
    """Why Triton's kernels cannot be used on this GPU; empty if they can."""
    try:
        worst = largest_error(shape)
    except Exception as error:  # Triton has its own for every way of failing
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return "" if worst < limit(shape) else f"its results are {worst:g} off"


def limit(shape: DecodeShape) -> float:
    """What rounding may make of results that are no larger than a few."""
    return 1e-3 if shape.dtype == shape.cache_dtype == torch.float32 else 0.05


def largest_error(shape: DecodeShape) -> float:
    """Against the reference, over sequences of one part and of several."""
    lengths = (1, 19, 1100)
    size, device = shape.block_size, shape.device
    blocks = list(range(-(-max(lengths) // size)))[::-1]
    random = torch.Generator(device).manual_seed(0)
    cached = (2, shape.kv_heads, len(blocks) * size, shape.dim)
    cache_2KND = torch.randn(cached, generator=random, device=device).to(shape.cache_dtype)
    q_shape = (len(lengths), shape.heads, shape.dim)
    q_THD = torch.randn(q_shape, generator=random, device=device).to(shape.dtype)
    contexts = [
        SequenceContext(slice(row, row + 1), length - 1, blocks, size)
        for row, length in enumerate(lengths)
    ]
    told = q_THD, cache_2KND[0], cache_2KND[1], contexts, shape.window
    got = paged_attention(*told, decode_rows(contexts, device), triton_kernel)
    difference = got.float() - reference.paged_attention(*told).float()
    return float(difference.abs().nan_to_num(torch.inf).max())
