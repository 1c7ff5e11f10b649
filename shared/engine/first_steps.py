"""When sequences were queued, and when the first step of each started."""

from __future__ import annotations

import time
from collections.abc import Callable

from .sequence import Sequence


class FirstSteps:
    """The times of sequences whose prompts are not computed yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queued_at: dict[Sequence, float] = {}
        self._started_at: dict[Sequence, float] = {}

    def queued(self, sequence: Sequence, wait_seconds: float = 0.0) -> None:
        """The sequence may be scheduled from now on, after it waited ``wait_seconds`` for
        blocks."""
        self._queued_at[sequence] = self._clock() - wait_seconds

    def started(self, sequence: Sequence) -> float | None:
        """The sequence's first step starts. Returns the seconds that it waited; ``None`` for a
        further choice, which shares its leader's prompt."""
        queued_at = self._queued_at.pop(sequence, None)
        if queued_at is None:
            return None
        now = self._started_at[sequence] = self._clock()
        return now - queued_at

    def forget(self, sequence: Sequence) -> float:
        """Drop a sequence. Returns when its first step started, or 0.0 if unknown."""
        self._queued_at.pop(sequence, None)
        return self._started_at.pop(sequence, 0.0)
