"""The rows of a step whose hidden states are needed, and the results of pooling them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ....kernels.streams import to_host
from ..plan import HiddenStates, PooledRow, SequenceStep
from .sampler import NOT_FINITE_MESSAGE


class PooledSequence(NamedTuple):
    """A sequence that returns hidden states, and its number of rows."""

    sequence_id: int
    num_rows: int
    pool: PooledRow


@dataclass(slots=True)
class OutputRows:
    """Row numbers by their use, and the sequences that use them, in the same order."""

    sampling: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)  # the last rows of sequences that do not sample
    pooled: list[int] = field(default_factory=list)
    samples: list[SequenceStep] = field(default_factory=list)
    asks: list[SequenceStep] = field(default_factory=list)  # prompt logprobs
    computes: list[SequenceStep] = field(default_factory=list)  # of ``others``
    pools: list[PooledSequence] = field(default_factory=list)

    @property
    def all(self) -> list[int]:
        return self.sampling + self.prompt + self.others + self.pooled

    @property
    def needs_logits(self) -> bool:
        """True if a row needs the output of the last layer."""
        return bool(self.sampling or self.prompt or self.pooled)

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The hidden states of ``all``, by their use."""
        rows = (self.sampling, self.prompt, self.others, self.pooled)
        return hidden.split_with_sizes([len(each) for each in rows])


def output_rows(sequences: list[SequenceStep]) -> OutputRows:
    rows = OutputRows()
    first = 0
    for sequence in sequences:
        end = first + len(sequence.tokens)
        (rows.sampling if sequence.sample else rows.others).append(end - 1)
        (rows.samples if sequence.sample else rows.computes).append(sequence)
        if sequence.prompt_logprobs is not None and sequence.prompt_targets:
            rows.prompt += range(first, first + len(sequence.prompt_targets))
            rows.asks.append(sequence)
        if sequence.pool is not None and sequence.pool.hidden is not None:
            rows.pooled += _pooled_rows(sequence.pool.hidden, first, end)
            rows.pools.append(PooledSequence(sequence.sequence_id, end - first, sequence.pool))
        first = end
    return rows


def _pooled_rows(hidden: HiddenStates, first: int, end: int) -> range:
    if hidden == "sum":
        return range(first, end)
    row = end - 1 if hidden == "last" else first
    return range(row, row + 1)


def pooled_states(
    pools: list[PooledSequence],
    hidden: torch.Tensor,
    projected: Callable[[torch.Tensor], torch.Tensor],
    scores: Callable[[torch.Tensor], torch.Tensor | None],
) -> dict[int, torch.Tensor]:
    """Each sequence's vector, on its way to the host in one copy: ``projected`` of the sum of its
    pooled rows, or ``scores`` of their mean. Scores are missing if they are on another rank."""
    counts = [one.num_rows if one.pool.hidden == "sum" else 1 for one in pools]
    parts = list(zip(pools, hidden.split(counts) if pools else (), strict=True))
    vectors = [
        (one, projected(part.sum(0, dtype=torch.float32)))
        for one, part in parts
        if not one.pool.classify
    ]
    scored = [(one, _mean(part)) for one, part in parts if one.pool.classify]
    logits = scores(torch.cat([row for _, row in scored])) if scored else None
    if logits is not None:
        vectors += zip((one for one, _ in scored), logits, strict=True)
    if not vectors:
        return {}
    host = to_host(torch.cat([vector for _, vector in vectors]))
    each = host.split_with_sizes([len(vector) for _, vector in vectors])
    return {one.sequence_id: vector for (one, _), vector in zip(vectors, each, strict=True)}


def packed(vectors: dict[int, torch.Tensor]) -> dict[int, bytes]:
    """Vectors of float32 that have arrived on the host, as bytes."""
    return {sequence_id: vector.numpy().tobytes() for sequence_id, vector in vectors.items()}


def _mean(rows: torch.Tensor) -> torch.Tensor:
    return rows if len(rows) == 1 else rows.mean(0, keepdim=True, dtype=torch.float32)


def finite_rows(hidden: torch.Tensor) -> torch.Tensor:
    """True for each row without NaN and infinity, on its way to the host."""
    return to_host(hidden.sum(dim=-1, dtype=torch.float32).isfinite())


def not_finite(sequences: Sequence[SequenceStep], finite: torch.Tensor) -> dict[int, str]:
    """Failures of sequences that do not sample, by ``finite_rows`` of their last rows, which attend
    to all KV."""
    return {
        one.sequence_id: NOT_FINITE_MESSAGE
        for one, good in zip(sequences, finite.tolist(), strict=True)
        if not good
    }
