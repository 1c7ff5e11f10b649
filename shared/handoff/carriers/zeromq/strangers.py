"""A count of the connections to a listening rank that never become a peer's.

Whatever is wrong with a stranger (no ZeroMQ, no CURVE, an unknown key, a length beyond the limit, a
meaningless greeting), its connection is dropped or ignored. ZeroMQ reports only some of these, so
the count is the difference between accepted and greeted connections.
"""

from __future__ import annotations


class Strangers:
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
        """Strangers among all connections ``accepted`` so far; the count never falls."""
        if now - self._since >= self._patience:
            self._last, self._present, self._since = self._present, accepted, now
        self._count = max(self._count, self._last - self._greeted)
        return self._count
