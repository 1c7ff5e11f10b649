"""When a decode node is left alone because calls to it go unanswered.

A node may send heartbeats and not be reachable: a wrong --advertise, a firewall, a partition in one
direction. It looks idle then, so requests would be placed on it, and each would wait for its
timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...shared.process.backoff import PeerBackoff

# A node admits a request or refuses it within milliseconds. While one waits for longer, no further
# ones are sent after it.
SLOW_SECONDS = 2.0


class Ejection:
    """The calls to one start of one node that have not been answered yet, and what became of the
    others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unanswered: dict[Any, float] = {}
        self._avoidance = PeerBackoff(clock)

    @property
    def ejected(self) -> bool:
        """Whether requests should go elsewhere. After a pause one of them is let through, and the
        others wait for what becomes of it."""
        if self._avoidance.suspected:
            return bool(self._unanswered) or self._avoidance.left > 0
        if not self._unanswered:
            return False
        return self._clock() - next(iter(self._unanswered.values())) >= SLOW_SECONDS

    def asked(self, call: Any) -> None:
        self._unanswered[call] = self._clock()

    def answered(self, call: Any) -> None:
        """The node can be reached."""
        self._unanswered.pop(call, None)
        self._avoidance.end()

    def failed(self, call: Any) -> float:
        """The node could not be reached, or did not answer. Returns the pause that begins; 0 when
        one lasts already."""
        self._unanswered.pop(call, None)
        return self._avoidance.begin()

    def ended(self, call: Any) -> None:
        """The call has ended, and says nothing more of the node."""
        self._unanswered.pop(call, None)
