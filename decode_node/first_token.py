"""Breakdown of the time until a request's first token on its decode node."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..proto import tandem_pb2 as pb


class FirstTokenClock:
    """Divides the time since its creation among the phases of ``pb.FirstToken``.

    The phases do not overlap, so they add up to the whole. Durations that a prefill node reports
    are limited to the time measured here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self.durations = pb.FirstToken()

    def reserved(self) -> None:
        """Blocks for the prompt are reserved."""
        self.durations.queue_seconds += self._lap()

    def greeted(self) -> None:
        self.durations.greet_seconds += self._lap()

    def failed(self) -> None:
        """An attempt at a transfer failed."""
        self.durations.failed_seconds += self._lap()

    def received(self, done: pb.OpenDone | None) -> None:
        """The prompt's KV has arrived; ``done`` has the prefill node's durations, if reported."""
        elapsed = self._lap()
        if done is None:
            self.durations.prefill_seconds += elapsed
            return
        exposed = min(elapsed, max(0.0, done.exposed_seconds))
        computing = min(elapsed - exposed, max(0.0, done.compute_seconds))
        self.durations.transfer_seconds += exposed
        self.durations.prefill_seconds += computing
        self.durations.queue_seconds += elapsed - exposed - computing

    def sampled(self, started_at: float, *, remote: bool) -> None:
        """The first token is sampled; its sequence's first step began at ``started_at``."""
        self.durations.queue_seconds += self._lap(max(self._since, started_at))
        if remote:
            self.durations.step_seconds += self._lap()
        else:
            self.durations.prefill_seconds += self._lap()

    def _lap(self, until: float | None = None) -> float:
        now = self._clock()
        if until is not None:
            now = min(now, until)
        seconds, self._since = now - self._since, now
        return seconds
