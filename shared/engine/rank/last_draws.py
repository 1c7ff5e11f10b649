"""The tokens drawn by the last step, for rows that were planned before it ended."""

from __future__ import annotations

from collections.abc import Iterable

from ...models.parallel import TensorParallel
from ..plan import Sampled, SequenceStep, StepPlan


class StepVoidError(Exception):
    """The step was planned on top of one that failed."""


class LastDraws:
    """Replaces placeholders. Only rank 0 draws tokens, so it sends them to the other ranks."""

    def __init__(self, tp: TensorParallel) -> None:
        self._tp = tp
        self._tokens: dict[int, int] | None = {}  # by sequence; None: the last step failed

    def begin(self, plan: StepPlan) -> list[SequenceStep]:
        """Replace the placeholders of a plan, and return its rows.

        Raises ``StepVoidError`` if it was planned on top of a step that failed on any rank.
        """
        draws, self._tokens = self._tokens, None
        if not plan.ahead:
            return plan.sequences
        waiting = [row.sequence_id for row in plan.sequences if row.placeholder]
        # A row without a draw had logits that were not finite; the head drops it.
        own = None if draws is None else [draws.get(key, 0) for key in waiting]
        agreed = iter(self._agree(own, len(waiting)))
        for row in plan.sequences:
            if row.placeholder:
                row.tokens[:] = [next(agreed)]
        return plan.sequences

    def end(self, sampled: Iterable[Sampled]) -> None:
        """Note that the step has succeeded on this rank."""
        self._tokens = {draw.sequence_id: draw.tokens[-1] for draw in sampled}

    def _agree(self, own: list[int] | None, count: int) -> list[int]:
        """Rank 0's tokens, on every rank, unless the last step failed on one of them."""
        tokens = own if own is not None and self._tp.rank == 0 else [0] * count
        failures, *agreed = self._tp.agree([own is None, *tokens])
        if failures:
            raise StepVoidError("the step before failed")
        return agreed
