"""The masks of each step, computed in a thread while the ranks compute the step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...process.deep_thread import DeepThread
from ..plan import StepPlan, TokenMasks
from ..sequence import Phase, Sequence
from .constraint import Constraint

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Row:
    """A sequence whose draw waits for its mask, and its new tokens."""

    sequence_id: int
    constraint: Constraint
    tokens: list[int]


class StepMasks:
    """Sends one message for each step with constrained rows. A row without a mask in it may draw
    any token, or has ended, so that its draw is discarded."""

    def __init__(self, send: Callable[[TokenMasks], None]) -> None:
        self._send = send
        self._thread = DeepThread("masks")
        self._last_step = 0

    def begin(self, plan: StepPlan, sequences: Iterable[Sequence]) -> None:
        """Compute the masks of a step for its ``sequences``, whose earlier tokens must be known.
        No-op for a step that was begun before, or without constrained rows."""
        if plan.step <= self._last_step or not plan.columns.masked:
            return
        self._last_step = plan.step
        masked = set(plan.columns.masked)
        rows = [
            _Row(one.sequence_id, constraint, constraint.take(one.outputs))
            for one in sequences
            if one.sequence_id in masked
            and one.phase is not Phase.FINISHED
            and (constraint := one.generation.constraint) is not None
        ]
        masks = self._thread.run(lambda: _masks(plan.step, rows))
        masks.add_done_callback(self._computed)

    def skip(self, plan: StepPlan) -> None:
        """Let a step whose draws are void go on: the rank may already wait for its masks. No-op
        like ``begin``."""
        if plan.step > self._last_step and plan.columns.masked:
            self._last_step = plan.step
            self._send(TokenMasks(plan.step, {}))

    def _computed(self, future: asyncio.Future[TokenMasks]) -> None:
        if not future.cancelled():
            self._send(future.result())


def _masks(step: int, rows: list[_Row]) -> TokenMasks:
    masks = {row.sequence_id: _mask(step, row) for row in rows}
    return TokenMasks(step, {key: mask for key, mask in masks.items() if mask is not None})


def _mask(step: int, row: _Row) -> bytes | None:
    """The mask of one row. An error fails only this row, since the rank waits for all masks."""
    try:
        return row.constraint.next_mask(row.tokens)
    except Exception:
        log.exception("a token mask of step %d could not be computed", step)
        row.constraint.failure = "the node failed to compute its token mask"
        return None
