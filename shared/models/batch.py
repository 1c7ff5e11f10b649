"""The rows of one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...kernels.attention_metadata import (
    AttentionMetadata,
    SequenceMetadata,
    chunk_metadata,
    decode_metadata,
)


class SequenceRows(Protocol):
    """One sequence's tokens in a step; ``plan.SequenceStep`` is one."""

    @property
    def tokens(self) -> list[int]:
        """Token ids at positions ``start, start + 1, ...``."""

    @property
    def start(self) -> int:
        """The position of the first token."""

    @property
    def block_table(self) -> list[int]:
        """Blocks that cover ``start + len(tokens)`` tokens."""

    @property
    def second_text(self) -> int:
        """The position at which the second segment begins; 0 if there is only one."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of several sequences, flattened to T rows.

    ``output_rows`` are the rows whose hidden state is returned, or ``None`` for all. Unless
    ``needs_logits``, the model stops after the last layer's KV, and the hidden state is that
    layer's input. Without ``segments``, all tokens belong to the first. ``biases`` of each
    sequence's scores, [H, rows, tokens], are set by models that have them.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    output_rows: torch.Tensor | None
    needs_logits: bool = True
    segments: torch.Tensor | None = None
    biases: Sequence[torch.Tensor] | None = None


def build_batch(
    sequences: Iterable[SequenceRows],
    block_size: int,
    device: torch.device,
    output_rows: Sequence[int] | None = None,
    *,
    batched_decode: bool = False,
    batched_chunks: bool = False,
    needs_logits: bool = True,
) -> ForwardBatch:
    """Flatten the sequences; ``output_rows`` defaults to the last row of each."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    segments: list[int] = []
    metadata: list[SequenceMetadata] = []
    for sequence in sequences:
        table, start = sequence.block_table, sequence.start
        first, count = len(tokens), len(sequence.tokens)
        tokens += sequence.tokens
        span = range(start, start + count)
        positions += span
        second = sequence.second_text
        segments += [int(position >= second) for position in span] if second else [0] * count
        slots += [table[p // block_size] * block_size + p % block_size for p in span]
        metadata.append(SequenceMetadata(slice(first, first + count), start, table, block_size))
    if output_rows is None:
        output_rows = [each.rows.stop - 1 for each in metadata]
    rows = None
    if list(output_rows) != list(range(len(tokens))):
        rows = torch.tensor(output_rows, dtype=torch.int64, device=device)
    # A single tensor, for one allocation and one copy to the GPU.
    inputs = torch.from_numpy(np.array([tokens, positions, slots], np.int64)).to(device)
    token_ids, places, cache_slots = inputs.unbind()
    return ForwardBatch(
        token_ids,
        places,
        AttentionMetadata(
            metadata,
            cache_slots,
            decode_metadata(metadata, device) if batched_decode else None,
            chunk_metadata(metadata, device) if batched_chunks else None,
        ),
        rows,
        needs_logits,
        torch.tensor(segments, dtype=torch.int64, device=device) if any(segments) else None,
    )
