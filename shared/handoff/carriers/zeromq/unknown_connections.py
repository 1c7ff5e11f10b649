"""A count of connections to a listening rank that never greet as a peer.

They are dropped or ignored: they do not speak ZeroMQ or CURVE, have an unknown key, announce a
length beyond the limit, or send an invalid greeting. ZeroMQ reports only some of these, so the
count is the difference between accepted and greeted connections.
"""

from __future__ import annotations


class UnknownConnections:
    """``patience``: the seconds that a peer has to greet. The count lags by up to twice that."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._greeted = 0
        # Connections accepted before the present period, and before the last one.
        self._present = self._last = 0
        self._since = float("-inf")
        self._count = 0

    def greeted(self, connections: int) -> None:
        """Count connections that have greeted."""
        self._greeted += connections

    def count(self, accepted: int, now: float) -> int:
        """The number of unknown connections among all ``accepted`` so far; it never falls."""
        if now - self._since >= self._patience:
            self._last, self._present, self._since = self._present, accepted, now
        self._count = max(self._count, self._last - self._greeted)
        return self._count
