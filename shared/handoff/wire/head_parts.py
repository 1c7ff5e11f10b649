"""The assignment of KV heads to pairs of ranks, when two nodes have different numbers of ranks.

In each layer, a receiving rank needs its own heads, in runs that one sending rank holds. With more
ranks than heads, several ranks hold the same one; the receiving ranks that need it are then spread
over its holders in order, so that a rank receives most layers from the same peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

# The heads on one rank, layer by layer.
Heads = Sequence[range]


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Heads [first_head, end_head) of each of some consecutive layers; maybe none."""

    layers: int
    first_head: int
    end_head: int


@dataclass(frozen=True, slots=True)
class HeadPart:
    """What one rank sends to another: heads of each layer, numbered in the whole model."""

    receiver: int
    sender: int
    heads: tuple[HeadRun, ...]


def parts_of(receivers: Sequence[Heads], senders: Sequence[Heads]) -> list[HeadPart]:
    """Assign every receiving rank's heads in every layer to senders.

    Raises ``ValueError`` for a head that no sender has.
    """
    layers = len(receivers[0])
    found: dict[tuple[int, int], list[range]] = {}
    for layer in range(layers):
        wanted, held = ([heads[layer] for heads in ranks] for ranks in (receivers, senders))
        for receiver, sender, heads in _assigned(wanted, held):
            by_layer = found.setdefault((receiver, sender), [range(0)] * layers)
            by_layer[layer] = heads
    return [HeadPart(*pair, runs_of(found[pair])) for pair in sorted(found)]


def _assigned(
    receivers: Sequence[range], senders: Sequence[range]
) -> Iterator[tuple[int, int, range]]:
    """Triples of receiver, sender and heads, for one layer."""
    for receiver, wanted in enumerate(receivers):
        first = wanted.start
        while first < wanted.stop:
            sender = _sender_of(first, receiver, receivers, senders)
            end = min(wanted.stop, senders[sender].stop)
            yield receiver, sender, range(first, end)
            first = end


def _sender_of(
    head: int, receiver: int, receivers: Sequence[range], senders: Sequence[range]
) -> int:
    holders = [rank for rank, held in enumerate(senders) if head in held]
    if not holders:
        raise ValueError(f"no sending rank holds head {head}")
    if len(holders) == 1:
        return holders[0]
    needing = [rank for rank, wanted in enumerate(receivers) if head in wanted]
    return holders[needing.index(receiver) * len(holders) // len(needing)]


def runs_of(heads: Iterable[range]) -> tuple[HeadRun, ...]:
    """Heads by layer as runs of layers with the same."""
    runs = ((run, len(list(layers))) for run, layers in groupby(heads))
    return tuple(HeadRun(count, run.start, run.stop) for run, count in runs)
