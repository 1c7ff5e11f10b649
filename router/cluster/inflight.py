"""What a router has placed on a node, ahead of what the node reports.

A heartbeat is up to a second old, and a burst that goes by it alone goes to one node. So the router
counts its own prompts itself, from their placement until the node says that they are computed; a
report adds what others have queued there. And a prefix is expected where it was placed, until the
node has had the time to tell what it holds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

# The first report after a prompt was computed may have left the node before it.
REPORTS = 2


@dataclass(slots=True, eq=False)
class Placed:
    """One prompt on one node: what it has to compute there, what room it takes, and which keys
    the node will tell when it has. ``reports`` counts down once it is computed."""

    compute_tokens: int
    room_tokens: int
    keys: tuple[int, ...]
    reports: int = REPORTS


class InflightLoad:
    """The prompts of this router on one node. Each is begun once and ended once."""

    def __init__(self) -> None:
        self._compute_tokens = 0
        self._others_tokens = 0
        self.room_tokens = 0  # taken since the last report
        self._settling: list[Placed] = []
        self._expected: Counter[int] = Counter()

    @property
    def queued_tokens(self) -> int:
        """Tokens that the node has yet to compute."""
        return self._compute_tokens + self._others_tokens

    def expects(self, key: int) -> bool:
        return key in self._expected

    def begin(self, placed: Placed) -> None:
        self._compute_tokens += placed.compute_tokens
        self.room_tokens += placed.room_tokens
        self._expected.update(placed.keys)

    def end(self, placed: Placed, *, computed: bool) -> None:
        """The prompt is computed there, or will never be."""
        self._compute_tokens -= placed.compute_tokens
        if computed:
            self._settling.append(placed)
        else:
            self._forget(placed)

    def reported(self, queued_tokens: int) -> None:
        """The node has said how many tokens are queued on it, ours and others'."""
        self._others_tokens = max(0, queued_tokens - self._compute_tokens)
        self.room_tokens = 0
        for placed in self._settling:
            placed.reports -= 1
            if not placed.reports:
                self._forget(placed)
        self._settling = [placed for placed in self._settling if placed.reports]

    def _forget(self, placed: Placed) -> None:
        self._expected.subtract(placed.keys)
        for key in placed.keys:
            if self._expected[key] <= 0:
                del self._expected[key]


class Booking:
    """One prompt in the ledgers of all nodes that it was placed on, by their names."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, InflightLoad, Placed]] = []

    def enter(self, node_id: str, ledger: InflightLoad, placed: Placed) -> None:
        ledger.begin(placed)
        self._entries.append((node_id, ledger, placed))

    def settle(self, *computed_on: str) -> None:
        """The prompt is computed, and these nodes hold it; with none, it was given up. Only the
        first word counts."""
        entries, self._entries = self._entries, []
        for node_id, ledger, placed in entries:
            ledger.end(placed, computed=node_id in computed_on)
