"""Counts those who connect to a listening rank and never become a peer.

Whatever is wrong with a stranger (no ZeroMQ, no CURVE, an unknown key, a length beyond the limit, a
greeting that makes no sense), its connection is dropped or ignored, and no peer comes of it. ZeroMQ
tells the reasons of some only, so what is counted is the difference: accepted, but not greeted.
"""

from __future__ import annotations

import zmq

from .zmq_sockets import CONTROL_BATCH, Socket


class Strangers:
    """``patience``: seconds in which a peer has greeted. The count is up to twice that old."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._monitors: list[Socket] = []
        self._accepted = self._greeted = 0
        # Accepted when the present and the last period began.
        self._present = self._last = 0
        self._since = float("-inf")
        self._count = 0

    def watch(self, socket: Socket) -> None:
        """Count who connects to it. What is counted waits in a queue, which ``count`` empties."""
        self._monitors.append(socket.get_monitor_socket(zmq.EVENT_ACCEPTED))

    def sockets(self) -> list[Socket]:
        return self._monitors

    def greeted(self, connections: int) -> None:
        """These were no strangers."""
        self._greeted += connections

    def count(self, now: float) -> int:
        """Strangers so far; it never falls."""
        for monitor in self._monitors:
            self._accepted += _drained(monitor)
        if now - self._since >= self._patience:
            self._last, self._present, self._since = self._present, self._accepted, now
        self._count = max(self._count, self._last - self._greeted)
        return self._count

    def close(self) -> None:
        for monitor in self._monitors:
            monitor.close(0)
        self._monitors = []


def _drained(monitor: Socket) -> int:
    """Events that were waiting, a bounded number."""
    for number in range(CONTROL_BATCH):
        try:
            monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return number
    return CONTROL_BATCH
