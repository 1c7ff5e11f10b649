"""The steps that ranks have been given, and whose results are not known yet.

While one step runs, the next may be planned on top of it. Until then a token that the running step
draws is a placeholder: its position is known, its id is not. The counts of a sequence
(``in_flight``, ``placeholders``) change only here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..plan import SequenceStep
from ..sequence import Sequence

# The running step, and one planned on top of it. More would only keep new requests waiting.
MAX_STEPS = 2


class BlocksInFlightError(Exception):
    """Blocks would have to be taken from a sequence that a step in flight reads and writes."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step's rows, and the sequences that the ranks forget before it."""

    rows: dict[Sequence, SequenceStep]
    removed: list[int]


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
    def oldest(self) -> list[Sequence]:
        """The sequences of the oldest step."""
        return list(self._steps[0].rows) if self._steps else []

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
