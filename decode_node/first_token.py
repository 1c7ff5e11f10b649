"""Breakdown of the time until a request's first token on its decode node."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..proto import tandem_pb2 as pb


class FirstTokenClock:
    """Divides the time since its creation among the phases of ``pb.FirstToken``.

    Each moment belongs to one phase, so the phases add up to the whole. The durations that a
    prefill node reports are limited to the time measured here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self.spent = pb.FirstToken()

    def reserved(self) -> None:
        """There are blocks to receive the prompt in."""
        self.spent.queue_seconds += self._lap()

    def greeted(self) -> None:
        self.spent.greet_seconds += self._lap()

    def failed(self) -> None:
        """An attempt at a transfer failed, with all the time it took."""
        self.spent.failed_seconds += self._lap()

    def received(self, done: pb.OpenDone | None) -> None:
        """The prompt's KV came from a prefill node, which may have reported its durations."""
        left = self._lap()
        if done is None:
            self.spent.prefill_seconds += left
            return
        exposed = min(left, max(0.0, done.exposed_seconds))
        computing = min(left - exposed, max(0.0, done.compute_seconds))
        self.spent.transfer_seconds += exposed
        self.spent.prefill_seconds += computing
        self.spent.queue_seconds += left - exposed - computing

    def sampled(self, started_at: float, *, remote: bool) -> None:
        """The first token is sampled; its sequence's first step began at ``started_at``, by this
        clock."""
        self.spent.queue_seconds += self._lap(max(self._since, started_at))
        if remote:
            self.spent.step_seconds += self._lap()
        else:
            self.spent.prefill_seconds += self._lap()

    def _lap(self, until: float | None = None) -> float:
        now = self._clock()
        if until is not None:
            now = min(now, until)
        seconds, self._since = now - self._since, now
        return seconds
