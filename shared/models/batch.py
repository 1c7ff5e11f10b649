"""One forward pass's worth of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...kernels.decode_rows import DecodeRows, decode_rows
from ...kernels.reference.attention import SequenceContext


class Rows(Protocol):
    """What one sequence brings to a step; ``plan.SequenceStep`` is one."""

    @property
    def tokens(self) -> list[int]:
        """Token ids at positions ``start, start + 1, ...``."""

    @property
    def start(self) -> int:
        """The position of the first one."""

    @property
    def block_table(self) -> list[int]:
        """Blocks that cover ``start + len(tokens)`` tokens."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of several sequences, flattened to T rows.

    ``output_rows`` are the rows whose hidden state is wanted. Unless ``needs_logits``, the model
    stops after the last layer's KV, and the hidden state is what that layer began with.
    ``decodes`` are those of ``contexts`` that are attended together.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    contexts: list[SequenceContext]
    output_rows: torch.Tensor
    decodes: DecodeRows | None = None
    needs_logits: bool = True


def build_batch(
    sequences: Iterable[Rows],
    block_size: int,
    device: torch.device,
    output_rows: Sequence[int] | None = None,
    *,
    decodes_together: bool = False,
    needs_logits: bool = True,
) -> ForwardBatch:
    """Flatten; without ``output_rows``, the last row of each sequence."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    contexts: list[SequenceContext] = []
    for sequence in sequences:
        table, start = sequence.block_table, sequence.start
        first, count = len(tokens), len(sequence.tokens)
        tokens += sequence.tokens
        span = range(start, start + count)
        positions += span
        slots += [table[p // block_size] * block_size + p % block_size for p in span]
        contexts.append(SequenceContext(slice(first, first + count), start, table, block_size))
    if output_rows is None:
        output_rows = [context.rows.stop - 1 for context in contexts]
    return ForwardBatch(
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        torch.tensor(slots, dtype=torch.int64, device=device),
        contexts,
        torch.tensor(output_rows, dtype=torch.int64, device=device),
        decode_rows(contexts, device) if decodes_together else None,
        needs_logits,
    )
