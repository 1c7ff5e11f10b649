"""The tokens drawn by the last step, for rows that were planned before it ended."""

from __future__ import annotations

import torch

from ...models.parallel import TensorParallel
from ..plan import PLACEHOLDER, StepPlan


class StepVoidError(Exception):
    """The step was planned on top of one that failed."""


class LastDraws:
    """Shares ``last_tokens``, which rank 0 draws, with the other ranks."""

    def __init__(self, tp: TensorParallel, last_tokens: torch.Tensor) -> None:
        self._tp = tp
        self._last_tokens = last_tokens
        self._failed = False  # the last step

    def begin(self, plan: StepPlan) -> None:
        """Make the last tokens of a plan's placeholders known on this rank.

        Raises ``StepVoidError`` if it was planned on top of a step that failed on any rank.
        """
        failed, self._failed = self._failed, True
        if not plan.ahead:
            return
        # On the ranks' CPUs, so that none waits for a device.
        if self._tp.agree([failed])[0]:
            raise StepVoidError("the step before failed")
        if self._tp.size > 1 and PLACEHOLDER in plan.columns.tokens:
            self._tp.broadcast(self._last_tokens)

    def end(self) -> None:
        """Note that the step has succeeded on this rank."""
        self._failed = False
