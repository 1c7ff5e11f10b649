"""Pauses between attempts: each about twice as long as the one before, up to a limit."""

from __future__ import annotations

import random


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
