"""Counts those who connect to a listening rank and never become a peer.

Whatever is wrong with a stranger (no ZeroMQ, no CURVE, an unknown key, a length beyond the limit, a
greeting that makes no sense), its connection is dropped or ignored, and no peer comes of it. ZeroMQ
tells the reasons of some only, so what is counted is the difference: accepted, but not greeted.
"""

from __future__ import annotations


class Strangers:
    """``patience``: seconds in which a peer has greeted. The count is up to twice that old."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._greeted = 0
        # Accepted when the present and the last period began.
        self._present = self._last = 0
        self._since = float("-inf")
        self._count = 0

    def greeted(self, connections: int) -> None:
        """These were no strangers."""
        self._greeted += connections

    def count(self, accepted: int, now: float) -> int:
        """Strangers among all that were ``accepted`` so far; it never falls."""
        if now - self._since >= self._patience:
            self._last, self._present, self._since = self._present, accepted, now
        self._count = max(self._count, self._last - self._greeted)
        return self._count
