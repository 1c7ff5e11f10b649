"""Time that stands still until a test moves it, or that goes on at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


class SteppedClock:
    """A clock for code that takes one: ``now`` is its time."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def pausing(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that lets the monotonic clock go on by some seconds at once, as in a pause of the
    machine."""
    now, lost = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now() + lost[0])

    def pause(seconds: float) -> None:
        lost[0] += seconds

    return pause
