"""Who sends which KV heads to whom, when two nodes have different numbers of ranks.

Each rank that receives needs its own heads, in runs that one sending rank holds. Where there are
more ranks than heads, several hold the same; then receiving ranks take turns among the holders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Heads (their numbers in the whole model) that one rank sends to one other."""

    receiver: int
    sender: int
    heads: range


def parts_of(receivers: Sequence[range], senders: Sequence[range]) -> list[HeadPart]:
    """Every receiving rank's heads, each from one sender. Both are the heads that each rank holds.

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
