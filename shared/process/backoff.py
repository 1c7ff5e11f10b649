"""Exponential backoff: each pause is about twice as long as the last, up to a limit."""

from __future__ import annotations

import random
from collections.abc import Callable

# A single failure may be over at once; a lasting one must not cost many requests.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


class Backoff:
    """Exponential backoff with jitter, so that processes that failed together spread their
    retries."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._failures = 0

    def pause(self) -> float:
        """Count one more failure; seconds to wait: half to all of the doubled pause."""
        # Bounded, because a float overflow raises.
        longest = min(self._first * 2.0 ** min(self._failures, 64), self._longest)
        self._failures += 1
        return random.uniform(longest / 2, longest)

    def reset(self) -> None:
        """Return to the shortest pause after a success."""
        self._failures = 0


class PeerBackoff:
    """Backoff from one peer. Each pause is twice as long as the last, until a success. No jitter,
    because a single owner backs off."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause = 0.0
        self._until = float("-inf")

    def begin(self) -> float:
        """Record a failure. Returns the pause that begins, or 0 during a pause, so that callers
        that failed together resume together."""
        if self.left > 0:
            return 0.0
        self._pause = min(2 * self._pause or FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        self._until = self._clock() + self._pause
        return self._pause

    def end(self) -> None:
        """Record a success. Idempotent."""
        self._pause = 0.0
        self._until = float("-inf")

    @property
    def left(self) -> float:
        """Remaining seconds of the pause; 0 without one."""
        return max(0.0, self._until - self._clock())

    @property
    def suspected(self) -> bool:
        """True from a failure to the next success, also after the pause."""
        return self._pause > 0
