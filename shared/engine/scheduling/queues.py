"""Waiting and running sequences, in the order of the scheduling policy."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from ...config.limits import BACKGROUND_PRIORITY
from ..sequence import Phase, Sequence

_MID_STREAM_AHEAD = 1 << 62

# Shortest-first: the tokens that arriving one place earlier is worth. Later, shorter sequences can
# pass an older one only a bounded number of times, so nothing starves.
AGING_TOKENS = 64

Key = tuple[int, ...]
_POLICIES: dict[str, Callable[[Sequence], Key]] = {
    "fcfs": lambda s: (s.arrival,),
    "priority": lambda s: (s.priority, s.arrival),
    "shortest-first": lambda s: (len(s.prompt) + AGING_TOKENS * s.arrival, s.arrival),
}
POLICIES = tuple(_POLICIES)


def is_background(sequence: Sequence) -> bool:
    """True if all other sequences go first, under every policy."""
    return sequence.priority >= BACKGROUND_PRIORITY


class SequenceQueues:
    """The lists are sorted by ``key``: their first sequence runs first, their last gives up its
    blocks first. Those that are ``asking`` wait for a reservation."""

    def __init__(self, policy: str) -> None:
        by_policy = _POLICIES[policy]
        # A private sequence (a canary) goes first: it is short, and the peer that it tests may be
        # the one to take the work that waits.
        self.key: Callable[[Sequence], Key] = lambda s: (
            not s.work.private,
            is_background(s),
            *by_policy(s),
        )
        self.waiting: list[Sequence] = []
        self.asking: list[Sequence] = []
        self.running: list[Sequence] = []
        self._arrivals = 0

    def arrive(self, sequence: Sequence) -> None:
        """Number a sequence by its arrival."""
        self._arrivals += 1
        sequence.arrival = self._arrivals - (_MID_STREAM_AHEAD if sequence.mid_stream else 0)

    def wait(self, sequence: Sequence) -> None:
        if sequence.phase is not Phase.WAITING:
            sequence.move(Phase.WAITING)
        insort(self.waiting, sequence, key=self.key)

    def run(self, sequence: Sequence) -> None:
        """Move the head of the queue to the running sequences."""
        assert self.waiting[0] is sequence
        self.waiting.pop(0)
        sequence.move(Phase.RUNNING)
        insort(self.running, sequence, key=self.key)

    def remove(self, sequence: Sequence) -> None:
        """No-op for a sequence that is in no list."""
        for queue in (self.running, self.waiting, self.asking):
            if sequence in queue:
                queue.remove(sequence)
                return

    def first(self, one: Sequence, other: Sequence) -> bool:
        """True if ``one`` goes before ``other``."""
        return self.key(one) < self.key(other)

    def waiting_holders(self) -> list[Sequence]:
        """The sequences that wait with blocks, in order."""
        return sorted((s for s in [*self.waiting, *self.asking] if s.block_table), key=self.key)

    def holders(self) -> list[Sequence]:
        """Every sequence with blocks."""
        return [*(s for s in self.running if s.block_table), *self.waiting_holders()]
