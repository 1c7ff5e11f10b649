"""Exponential backoff: each pause is about twice as long as the last, up to a limit."""

from __future__ import annotations

import random
from collections.abc import Callable

# Short at first, since many failures are over at once; longer later, since a lasting one must not
# cost many requests.
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0


class Backoff:
    """Exponential backoff with jitter, which spreads the retries of processes that failed
    together."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._failures = 0

    def pause(self) -> float:
        """Count a failure; returns the seconds to wait, between half and all of the pause."""
        # The exponent is bounded, because a float overflow raises.
        longest = min(self._first * 2.0 ** min(self._failures, 64), self._longest)
        self._failures += 1
        return random.uniform(longest / 2, longest)

    def reset(self) -> None:
        """Return to the shortest pause after a success."""
        self._failures = 0


class PeerBackoff:
    """Backoff from one peer. There is no jitter, because a single owner backs off."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause = 0.0
        self._until = float("-inf")

    def begin(self) -> float:
        """Record a failure and start a pause; returns its seconds, or 0 if one is under way.

        Failures during a pause do not extend it."""
        if self.remaining > 0:
            return 0.0
        self._pause = min(2 * self._pause or FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        self._until = self._clock() + self._pause
        return self._pause

    def end(self) -> None:
        """Record a success. Idempotent."""
        self._pause = 0.0
        self._until = float("-inf")

    @property
    def remaining(self) -> float:
        """Remaining seconds of the pause; 0 without one."""
        return max(0.0, self._until - self._clock())

    @property
    def suspected(self) -> bool:
        """True from a failure to the next success, even after the pause."""
        return self._pause > 0
