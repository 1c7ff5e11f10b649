"""Detects a rank that answers pings but no longer computes.

Its main thread may hang while its other threads live. A rank's answers include the number of layers
it has computed. Answers are counted rather than seconds: on a machine so busy that nothing makes
progress, heads and their pings make none either.
"""

from __future__ import annotations

# Answers without a new layer before a rank counts as stuck. The first step may compile, and nothing
# is known yet of how long a layer takes.
MAX_STUCK_FIRST = 600
MAX_STUCK = 60
# A rank may become slower: a layer may take this many times the longest one so far.
PATIENCE = 10


class Watchdog:
    """The progress of one rank. ``begin`` and ``end`` surround each of its steps; the next one may
    begin before one has ended."""

    def __init__(self) -> None:
        self._steps = 0  # begun and not ended
        self._proven = False
        self._layers = 0
        self._unchanged = 0  # answers since the last new layer
        self._longest = 0

    def begin(self) -> None:
        if not self._steps:
            self._unchanged = 0
        self._steps += 1

    def end(self) -> None:
        self._moved()
        self._steps -= 1
        self._proven = True

    def answered(self, layers: int) -> None:
        """Note the answer to a ping: the number of layers since the rank's start."""
        if layers != self._layers:
            self._layers = layers
            self._moved()
        elif self._steps:
            self._unchanged += 1

    @property
    def stuck(self) -> int:
        """The number of answers without a new layer if there are too many, else 0."""
        limit = max(MAX_STUCK, PATIENCE * self._longest) if self._proven else MAX_STUCK_FIRST
        return self._unchanged if self._unchanged >= limit else 0

    def _moved(self) -> None:
        self._longest = max(self._longest, self._unchanged)
        self._unchanged = 0
