"""The steps that were sent to ranks and have no result yet.

While one step runs, the next may be planned on top of it. A token that the running step draws is a
placeholder in it: its position is known, its id is not. The counts ``in_flight`` and
``placeholders`` of sequences change only here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..plan import SequenceStep, StepPlan
from ..sequence import Sequence

# The running step, and one planned on top of it. More would only delay new requests.
MAX_STEPS = 2


class BlocksInFlightError(Exception):
    """The blocks to take belong to a sequence that a step in flight computes."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step's plan, its rows by sequence, and the limit of prompt tokens under which it was
    planned."""

    plan: StepPlan
    rows: dict[Sequence, SequenceStep]
    prompt_limit: int | None


class StepsInFlight:
    """Steps in the order in which ranks run them."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def full(self) -> bool:
        """True if no further step may be planned before one has ended."""
        return len(self._steps) >= MAX_STEPS

    @property
    def oldest(self) -> StepInFlight:
        """The step that ends next; there is one."""
        return self._steps[0]

    @property
    def ahead(self) -> list[StepInFlight]:
        """The steps that were planned on top of the oldest."""
        return list(self._steps)[1:]

    def begin(self, step: StepInFlight) -> None:
        self._steps.append(step)
        for sequence, row in step.rows.items():
            sequence.in_flight += len(row.tokens)
            sequence.placeholders += row.sample

    def end(self) -> StepInFlight:
        """Remove the oldest step."""
        step = self._steps.popleft()
        for sequence, row in step.rows.items():
            sequence.in_flight -= len(row.tokens)
            sequence.placeholders -= row.sample
        return step
