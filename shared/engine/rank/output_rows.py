"""The rows of a step whose hidden states are needed, and the results of pooling them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch

from ....kernels.streams import to_host
from ..plan import HiddenStates, SequenceStep
from .sampler import NOT_FINITE_MESSAGE


class SequenceRows(NamedTuple):
    """Rows of one sequence."""

    sequence: SequenceStep
    rows: range


class OutputRows(NamedTuple):
    """The rows of a step whose hidden states are needed, by their use: rows that are drawn from,
    those whose targets' logprobs are asked for, the last rows of sequences that do not sample, and
    those that are pooled."""

    drawn: list[int]
    prompts: list[SequenceRows]
    others: list[SequenceRows]
    pooled: list[SequenceRows]

    @property
    def all(self) -> list[int]:
        sequences = chain(self.prompts, self.others, self.pooled)
        return [*self.drawn, *chain.from_iterable(rows for _, rows in sequences)]

    @property
    def needs_logits(self) -> bool:
        """True if a row needs the output of the last layer."""
        return bool(self.drawn or self.prompts or self.pooled)

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The hidden states of ``all``, by their use."""
        counts = [sum(len(rows) for _, rows in use) for use in self[1:]]
        return hidden.split_with_sizes([len(self.drawn), *counts])


def output_rows(sequences: list[SequenceStep]) -> OutputRows:
    uses = OutputRows([], [], [], [])
    first = 0
    for one in sequences:
        end = first + len(one.tokens)
        if one.sample:
            uses.drawn.append(end - 1)
        else:
            uses.others.append(SequenceRows(one, range(end - 1, end)))
        if one.prompt_logprobs is not None and one.prompt_targets:
            rows = range(first, first + len(one.prompt_targets))
            uses.prompts.append(SequenceRows(one, rows))
        if one.pool is not None and one.pool.hidden is not None:
            rows = _pooled_rows(one.pool.hidden, first, end)
            uses.pooled.append(SequenceRows(one, rows))
        first = end
    return uses


def _pooled_rows(hidden: HiddenStates, first: int, end: int) -> range:
    if hidden == "sum":
        return range(first, end)
    row = end - 1 if hidden == "last" else first
    return range(row, row + 1)


def pooled_states(
    pooled: list[SequenceRows],
    hidden: torch.Tensor,
    projected: Callable[[torch.Tensor], torch.Tensor],
    scores: Callable[[torch.Tensor], torch.Tensor | None],
) -> dict[int, torch.Tensor]:
    """Each sequence's vector, on its way to the host in one copy: ``projected`` of the sum of its
    pooled rows, or ``scores`` of their mean. Scores are missing if they are on another rank."""
    states = hidden.split_with_sizes([len(rows) for _, rows in pooled])
    parts = [(one, part) for (one, _), part in zip(pooled, states, strict=True)]
    vectors = [
        (one, projected(part.sum(0, dtype=torch.float32)))
        for one, part in parts
        if not _classifies(one)
    ]
    scored = [(one, _mean(part)) for one, part in parts if _classifies(one)]
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


def _classifies(sequence: SequenceStep) -> bool:
    return sequence.pool is not None and sequence.pool.classify


def _mean(rows: torch.Tensor) -> torch.Tensor:
    return rows if len(rows) == 1 else rows.mean(0, keepdim=True, dtype=torch.float32)


def finite_rows(hidden: torch.Tensor) -> torch.Tensor:
    """True for each row without NaN and infinity, on its way to the host."""
    return to_host(hidden.sum(dim=-1, dtype=torch.float32).isfinite())


def not_finite(others: list[SequenceRows], finite: torch.Tensor) -> dict[int, str]:
    """Failures of sequences that do not sample, by ``finite_rows`` of their last rows, which attend
    to all KV."""
    return {
        one.sequence_id: NOT_FINITE_MESSAGE
        for (one, _), good in zip(others, finite.tolist(), strict=True)
        if not good
    }
