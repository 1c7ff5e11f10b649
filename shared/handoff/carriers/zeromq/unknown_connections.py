"""A count of the connections to a listening rank that never become a peer's.

Such a connection is dropped or ignored: it speaks no ZeroMQ or no CURVE, has an unknown key,
announces a length beyond the limit, or sends an invalid greeting. ZeroMQ reports only some of
these, so the count is the difference between accepted and greeted connections.
"""

from __future__ import annotations


class UnknownConnections:
    """``patience``: seconds within which a peer greets. The count is up to twice that old."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._greeted = 0
        # Accepted when the present and the last period began.
        self._present = self._last = 0
        self._since = float("-inf")
        self._count = 0

    def greeted(self, connections: int) -> None:
        """Count connections that have become a peer's."""
        self._greeted += connections

    def count(self, accepted: int, now: float) -> int:
        """The unknown ones among all connections ``accepted`` so far; the count never falls."""
        if now - self._since >= self._patience:
            self._last, self._present, self._since = self._present, accepted, now
        self._count = max(self._count, self._last - self._greeted)
        return self._count
