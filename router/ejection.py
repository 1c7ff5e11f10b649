"""When a decode node is left alone because calls to it go unanswered.

A node may send heartbeats and not be reachable: a wrong --advertise, a firewall, a partition in one
direction. It looks idle then, so requests would be placed on it, and each would wait for its
timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
# A node admits a request or refuses it within milliseconds. While one waits for longer, no further
# ones are sent after it.
SLOW_SECONDS = 2.0


class Ejection:
    """The calls to one start of one node that have not been answered yet, and what became of the
    others. Each pause is twice as long as the one before, until a call is answered."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unanswered: dict[Any, float] = {}
        self._pause = 0.0
        self._until = float("-inf")

    @property
    def ejected(self) -> bool:
        """Whether requests should go elsewhere. After a pause one of them is let through, and the
        others wait for what becomes of it."""
        if not self._unanswered and not self._pause:
            return False
        now = self._clock()
        oldest = next(iter(self._unanswered.values()), now)
        trying = bool(self._pause and self._unanswered)
        return now < self._until or trying or now - oldest >= SLOW_SECONDS

    def asked(self, call: Any) -> None:
        self._unanswered[call] = self._clock()

    def answered(self, call: Any) -> None:
        """The node can be reached."""
        self._unanswered.pop(call, None)
        self._pause = 0.0
        self._until = float("-inf")

    def failed(self, call: Any) -> float:
        """The node could not be reached, or did not answer. Returns the pause that begins; 0 when
        one lasts already: all who waited together come back together."""
        self._unanswered.pop(call, None)
        now = self._clock()
        if now < self._until:
            return 0.0
        self._pause = min(2 * self._pause or FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        self._until = now + self._pause
        return self._pause

    def ended(self, call: Any) -> None:
        """The call has ended, and says nothing more of the node."""
        self._unanswered.pop(call, None)
