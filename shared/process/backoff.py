"""Pauses between attempts: each about twice as long as the one before, up to a limit."""

from __future__ import annotations

import random
from collections.abc import Callable

# What has failed once may work at once again; what fails for long must not cost a request often.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


class Backoff:
    """Exponential, with jitter: processes that failed together do not come back together."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._failures = 0

    def pause(self) -> float:
        """Seconds to wait after one more failure: half to all of the doubled pause."""
        # The exponent is bounded: a float that overflows is an error.
        longest = min(self._first * 2.0 ** min(self._failures, 64), self._longest)
        self._failures += 1
        return random.uniform(longest / 2, longest)

    def reset(self) -> None:
        """Something worked; the next pause is short again."""
        self._failures = 0


class PeerBackoff:
    """Whether something that failed is left alone for now. Each pause is twice as long as the one
    before, until it works. No jitter: one owner leaves one thing alone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause = 0.0
        self._until = float("-inf")

    def begin(self) -> float:
        """It failed. Returns the pause that begins; 0 when one lasts already: all who waited
        together come back together."""
        if self.left > 0:
            return 0.0
        self._pause = min(2 * self._pause or FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        self._until = self._clock() + self._pause
        return self._pause

    def end(self) -> None:
        """It works; idempotent."""
        self._pause = 0.0
        self._until = float("-inf")

    @property
    def left(self) -> float:
        """Seconds of the pause that are left; 0 without one."""
        return max(0.0, self._until - self._clock())

    @property
    def suspected(self) -> bool:
        """It has failed, and not worked since; a pause may have ended."""
        return self._pause > 0
