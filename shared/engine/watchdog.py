"""Whether a rank that answers pings also computes: its main thread may hang while others live.

Its answers say how many layers it has computed. They are counted rather than seconds: on a machine
that is so busy that nobody gets anywhere, a head and its pings do not get anywhere either.
"""

from __future__ import annotations

# Answers without a new layer that are too many. The first step may compile, and nothing is known
# yet of how long a layer takes.
MAX_STILL_FIRST = 600
MAX_STILL = 60
# A rank is as slow as it has been before: a layer may take so many times the longest one until now.
PATIENCE = 10


class Watchdog:
    """Of one rank. ``begin`` and ``end`` stand around each of its steps."""

    def __init__(self) -> None:
        self._computing = False
        self._proven = False
        self._layers = 0
        self._still = 0
        self._longest = 0

    def begin(self) -> None:
        self._computing, self._still = True, 0

    def end(self) -> None:
        self._moved()
        self._computing, self._proven = False, True

    def answered(self, layers: int) -> None:
        """An answer to a ping, with the number of layers since the rank's start."""
        if layers != self._layers:
            self._layers = layers
            self._moved()
        elif self._computing:
            self._still += 1

    @property
    def still(self) -> int:
        """Answers without a new layer, when they are too many; else 0."""
        limit = max(MAX_STILL, PATIENCE * self._longest) if self._proven else MAX_STILL_FIRST
        return self._still if self._still >= limit else 0

    def _moved(self) -> None:
        self._longest = max(self._longest, self._still)
        self._still = 0
