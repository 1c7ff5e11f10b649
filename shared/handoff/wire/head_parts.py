"""The assignment of KV heads to pairs of ranks, when two nodes have different numbers of ranks.

Each receiving rank needs its own heads, in runs that one sending rank holds. With more ranks than
heads, several ranks hold the same one; then receiving ranks alternate among the holders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Heads, by their numbers in the whole model, that one rank sends to another."""

    receiver: int
    sender: int
    heads: range


def parts_of(receivers: Sequence[range], senders: Sequence[range]) -> list[HeadPart]:
    """Assign every receiving rank's heads to senders. Both arguments are the heads of each rank.

    Raises ``ValueError`` for a head that no sender has.
    """
    found = []
    for receiver, wanted in enumerate(receivers):
        first = wanted.start
        while first < wanted.stop:
            holders = [rank for rank, held in enumerate(senders) if first in held]
            if not holders:
                raise ValueError(f"no sending rank holds head {first}")
            sender = holders[receiver % len(holders)]
            end = min(wanted.stop, senders[sender].stop)
            found.append(HeadPart(receiver, sender, range(first, end)))
            first = end
    return found
