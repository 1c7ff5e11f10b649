"""The tokens that one step may compute, and those that it computes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..sequence import Sequence

# Prompt tokens that do not count as a chunk: they cost about as much as a decoding row.
SMALL_PROMPT = 16


class StepCounts(NamedTuple):
    """The sequences that a step decodes, its prompt tokens, and those among them that count as
    ``paced``: a limit beside streams holds for them, and not for small prompts, which may be in
    every step."""

    decoded: int
    prompt: int
    paced: int

    @classmethod
    def of(cls, shares: Iterable[int]) -> StepCounts:
        """The counts of a step with these tokens of each sequence."""
        rows = list(shares)
        prompt = sum(tokens for tokens in rows if tokens > 1)
        paced = sum(tokens for tokens in rows if tokens > SMALL_PROMPT)
        return cls(rows.count(1), prompt, paced)


class StepBudget:
    """The shares granted so far and the tokens that remain. One object a step.

    ``prompts`` limits the tokens of chunks beside streams (``None``: no limit).
    """

    def __init__(self, tokens: int) -> None:
        self.remaining = tokens
        self.prompts: int | None = None
        self.shares: dict[Sequence, int] = {}

    def share(self, missing: int) -> int:
        """The number of its ``missing`` tokens that a sequence may compute."""
        if self.prompts is None or missing <= SMALL_PROMPT:
            return min(missing, self.remaining)
        # A smaller chunk would not count, so every long prompt would get one.
        limit = self.prompts if self.prompts > SMALL_PROMPT else 0
        return min(missing, self.remaining, limit)

    def grant(self, sequence: Sequence, tokens: int) -> None:
        self._add(-tokens)
        self.shares[sequence] = tokens

    def take_back(self, sequence: Sequence) -> None:
        self._add(self.shares.pop(sequence, 0))

    def _add(self, tokens: int) -> None:
        self.remaining += tokens
        if self.prompts is not None and abs(tokens) > SMALL_PROMPT:
            self.prompts += tokens
