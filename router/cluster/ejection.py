"""Ejection of a decode node whose requests get no answer, as in Envoy's outlier detection.

A node may send heartbeats and yet be unreachable: a wrong --advertise, a firewall, a partition in
one direction. It then looks idle, so requests would be placed on it, and each would wait for its
timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...shared.process.backoff import PeerBackoff

# A node admits or rejects a request within milliseconds. While one waits longer, no others are sent
# after it.
SLOW_SECONDS = 2.0


class Ejection:
    """The unanswered requests to one start of a node, and the backoff after failed ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        # False if the node is certainly not ejected. Placement looks at many nodes, and this is
        # quick to read.
        self.doubtful = False
        self._clock = clock
        self._unanswered: dict[Any, float] = {}
        self._backoff = PeerBackoff(clock)

    @property
    def ejected(self) -> bool:
        """True if requests should go elsewhere. After a pause one request is let through, and the
        others wait for its result."""
        if self._backoff.suspected:
            return bool(self._unanswered) or self._backoff.remaining > 0
        if not self._unanswered:
            return False
        return self._clock() - next(iter(self._unanswered.values())) >= SLOW_SECONDS

    def sent(self, remote: Any, *, compiles: bool = False) -> None:
        """Record that a request was sent. If the node ``compiles`` a grammar for it first, it may
        take seconds and does not count as slow."""
        if compiles and not self._backoff.suspected:
            return
        self._unanswered[remote] = self._clock()
        self.doubtful = True

    def answered(self, remote: Any) -> None:
        """Record an answer: the node can be reached."""
        self._unanswered.pop(remote, None)
        self._backoff.end()
        self.doubtful = bool(self._unanswered)

    def reached(self) -> None:
        """Record that the node, which was unreachable, answers again."""
        self._backoff.end()
        self.doubtful = bool(self._unanswered)

    def failed(self, remote: Any) -> float:
        """Record that the node was not reached, or did not answer. Returns the pause that begins,
        or 0 during a pause."""
        self._unanswered.pop(remote, None)
        self.doubtful = True
        return self._backoff.begin()

    def ended(self, remote: Any) -> None:
        """Forget a request, which proves nothing if it was not answered."""
        self._unanswered.pop(remote, None)
        self.doubtful = bool(self._unanswered) or self._backoff.suspected
