"""Detection of a rank that replies to pings but no longer computes.

A rank's main thread may hang while its other threads run. Its pongs include the number of layers
that it has computed. Pongs are counted rather than seconds: on a machine so busy that nothing makes
progress, there are no pings either.
"""

from __future__ import annotations

# Pongs without a new layer before a rank counts as stuck. The first step may compile kernels, and
# the duration of a layer is not known yet.
MAX_STUCK_FIRST = 600
MAX_STUCK = 60
# A layer may take this many times as long as the longest one so far.
PATIENCE = 10


class Watchdog:
    """The progress of one rank. ``begin`` and ``end`` surround each of its steps; a step may begin
    before the last one has ended."""

    def __init__(self) -> None:
        self._steps = 0  # in flight
        self._has_stepped = False
        self._layers = 0
        self._pongs = 0  # since the last new layer
        self._longest = 0

    def begin(self) -> None:
        if not self._steps:
            self._pongs = 0
        self._steps += 1

    def end(self) -> None:
        self._note_progress()
        self._steps -= 1
        self._has_stepped = True

    def note_pong(self, layers: int) -> None:
        """Note a pong with the number of layers since the rank's start."""
        if layers != self._layers:
            self._layers = layers
            self._note_progress()
        elif self._steps:
            self._pongs += 1

    @property
    def stuck(self) -> int:
        """The number of pongs without a new layer if there are too many, else 0."""
        limit = max(MAX_STUCK, PATIENCE * self._longest) if self._has_stepped else MAX_STUCK_FIRST
        return self._pongs if self._pongs >= limit else 0

    def _note_progress(self) -> None:
        self._longest = max(self._longest, self._pongs)
        self._pongs = 0
