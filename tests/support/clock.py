"""Time that stands still until a test moves it."""

from __future__ import annotations


class SteppedClock:
    """A clock for code that takes one: ``now`` is its time."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
