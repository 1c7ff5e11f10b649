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
    """A sequence whose draw waits for its mask, and the tokens that its grammar lacks."""

    sequence_id: int
    constraint: Constraint
    tokens: list[int]


class StepMasks:
    """Every step with constrained rows gets one message of masks. A row may lack one in it: any
    token may be drawn for it, or the draw counts for nothing, as the row has ended."""

    def __init__(self, send: Callable[[TokenMasks], None]) -> None:
        self._send = send
        self._thread = DeepThread("masks")
        self._begun = 0

    def begin(self, plan: StepPlan, sequences: Iterable[Sequence]) -> None:
        """Compute the masks of a step whose rows are of ``sequences``. The tokens before it must be
        known. No-op if it was done for this step before, or if no row needs one."""
        if plan.step <= self._begun or not plan.masked:
            return
        self._begun = plan.step
        masked = {row.sequence_id for row in plan.sequences if row.masked}
        rows = [
            _Row(one.sequence_id, constraint, constraint.take(one.outputs))
            for one in sequences
            if one.sequence_id in masked
            and one.phase is not Phase.FINISHED
            and (constraint := one.generation.constraint) is not None
        ]
        masks = self._thread.run(lambda: _masks(plan.step, rows))
        masks.add_done_callback(self._computed)

    def _computed(self, done: asyncio.Future[TokenMasks]) -> None:
        if not done.cancelled():
            self._send(done.result())


def _masks(step: int, rows: list[_Row]) -> TokenMasks:
    masks = {row.sequence_id: _mask(step, row) for row in rows}
    return TokenMasks(step, {key: mask for key, mask in masks.items() if mask is not None})


def _mask(step: int, row: _Row) -> bytes | None:
    """The mask of one row. One that raises costs no other: a rank waits for the masks of all."""
    try:
        return row.constraint.next_mask(row.tokens)
    except Exception:
        log.exception("a mask of step %d could not be computed", step)
        row.constraint.failure = "the node had an error in its grammar"
        return None
