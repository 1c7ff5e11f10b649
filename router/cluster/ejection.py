"""Ejection of decode nodes that do not reply, as in Envoy's outlier detection.

A node may send heartbeats and yet be unreachable: a wrong --advertise, a firewall, a one-way
partition. It then looks idle, so requests would be placed on it, and each would wait for its
timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...shared.process.backoff import PeerBackoff

# A node admits or rejects a request within milliseconds. While a request waits longer, no others
# are sent.
SLOW_SECONDS = 2.0


class Ejection:
    """The unanswered requests to one start of a node, and the backoff after failures."""

    def __init__(self, clock: Callable[[], float]) -> None:
        # False if the node is certainly not ejected; cheap to read, since placement looks at many
        # nodes.
        self.doubtful = False
        self._clock = clock
        self._unanswered: dict[Any, float] = {}
        self._backoff = PeerBackoff(clock)

    @property
    def ejected(self) -> bool:
        """True if requests should go elsewhere. After a pause one request is sent as a probe, and
        the others wait for its result."""
        if self._backoff.suspected:
            return bool(self._unanswered) or self._backoff.remaining > 0
        if not self._unanswered:
            return False
        return self._clock() - next(iter(self._unanswered.values())) >= SLOW_SECONDS

    def on_sent(self, remote: Any, *, compiles: bool = False) -> None:
        """Record that a request was sent. One for which the node ``compiles`` a grammar first may
        take seconds and does not count as slow."""
        if compiles and not self._backoff.suspected:
            return
        self._unanswered[remote] = self._clock()
        self.doubtful = True

    def on_reply(self, remote: Any) -> None:
        """Record a reply: the node is reachable."""
        self._unanswered.pop(remote, None)
        self._backoff.end()
        self.doubtful = bool(self._unanswered)

    def on_reachable(self) -> None:
        """Record that the node, which was unreachable, replies again."""
        self._backoff.end()
        self.doubtful = bool(self._unanswered)

    def on_failure(self, remote: Any) -> float:
        """Record that the node was not reached or did not reply. Returns the seconds of the pause
        that begins; 0 if one is running."""
        self._unanswered.pop(remote, None)
        self.doubtful = True
        return self._backoff.begin()

    def on_end(self, remote: Any) -> None:
        """Forget a request. One that ended without a reply proves nothing."""
        self._unanswered.pop(remote, None)
        self.doubtful = bool(self._unanswered) or self._backoff.suspected
