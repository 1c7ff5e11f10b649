"""The rows of a step whose hidden states are needed, and the results of pooling them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain, compress
from typing import NamedTuple

import torch

from ....kernels.streams import to_host
from ..plan import HiddenStates, StepColumns
from .sampler import NOT_FINITE_MESSAGE


class SequenceRows(NamedTuple):
    """Rows of one sequence, whose row in the step's columns is ``number``."""

    number: int
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


def output_rows(columns: StepColumns) -> OutputRows:
    ends = [*accumulate(columns.count)]
    prompts, pooled = [], []
    for number, (_, targets) in columns.prompt_logprobs.items():
        if targets:
            first = ends[number] - columns.count[number]
            prompts.append(SequenceRows(number, range(first, first + len(targets))))
    for number, pool in columns.pool.items():
        if pool.hidden is not None:
            first = ends[number] - columns.count[number]
            pooled.append(SequenceRows(number, _pooled_rows(pool.hidden, first, ends[number])))
    return OutputRows(
        [end - 1 for end in compress(ends, columns.sample)],
        prompts,
        [
            SequenceRows(number, range(ends[number] - 1, ends[number]))
            for number, samples in enumerate(columns.sample)
            if not samples
        ],
        pooled,
    )


def _pooled_rows(hidden: HiddenStates, first: int, end: int) -> range:
    if hidden == "sum":
        return range(first, end)
    row = end - 1 if hidden == "last" else first
    return range(row, row + 1)


def pooled_states(
    columns: StepColumns,
    pooled: list[SequenceRows],
    hidden: torch.Tensor,
    projected: Callable[[torch.Tensor], torch.Tensor],
    scores: Callable[[torch.Tensor], torch.Tensor | None],
) -> dict[int, torch.Tensor]:
    """Each sequence's vector, on its way to the host in one copy: ``projected`` of the sum of its
    pooled rows, or ``scores`` of their mean. Scores are missing if they are on another rank."""
    states = hidden.split_with_sizes([len(rows) for _, rows in pooled])
    vectors, scored = {}, {}
    for (number, _), part in zip(pooled, states, strict=True):
        sequence_id = columns.sequence_id[number]
        if columns.pool[number].classify:
            scored[sequence_id] = _mean(part)
        else:
            vectors[sequence_id] = projected(part.sum(0, dtype=torch.float32))
    logits = scores(torch.cat([*scored.values()])) if scored else None
    if logits is not None:
        vectors |= zip(scored, logits, strict=True)
    if not vectors:
        return {}
    host = to_host(torch.cat([*vectors.values()]))
    each = host.split_with_sizes([len(vector) for vector in vectors.values()])
    return dict(zip(vectors, each, strict=True))


def packed(vectors: dict[int, torch.Tensor]) -> dict[int, bytes]:
    """Vectors of float32 that have arrived on the host, as bytes."""
    return {sequence_id: vector.numpy().tobytes() for sequence_id, vector in vectors.items()}


def _mean(rows: torch.Tensor) -> torch.Tensor:
    return rows if len(rows) == 1 else rows.mean(0, keepdim=True, dtype=torch.float32)


def finite_rows(hidden: torch.Tensor) -> torch.Tensor:
    """True for each row without NaN and infinity, on its way to the host."""
    return to_host(hidden.sum(dim=-1, dtype=torch.float32).isfinite())


def not_finite(
    columns: StepColumns, others: list[SequenceRows], finite: torch.Tensor
) -> dict[int, str]:
    """Failures of sequences that do not sample, by ``finite_rows`` of their last rows, which attend
    to all KV."""
    return {
        columns.sequence_id[number]: NOT_FINITE_MESSAGE
        for (number, _), good in zip(others, finite.tolist(), strict=True)
        if not good
    }
