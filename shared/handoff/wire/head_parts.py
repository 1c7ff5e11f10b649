"""The assignment of KV heads to pairs of ranks, when two nodes have different numbers of ranks.

In each layer, a receiving rank gets its heads in runs, each from one sending rank. With more ranks
than heads, several ranks have the same head; the receiving ranks that need it are then spread over
its holders in order, so that a rank receives most layers from the same peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

# The heads on one rank, layer by layer.
Heads = Sequence[range]


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Heads [first_head, end_head), possibly none, of each of consecutive layers."""

    layers: int
    first_head: int
    end_head: int


@dataclass(frozen=True, slots=True)
class HeadPart:
    """The heads of each layer that one rank sends to another, numbered in the whole model."""

    receiver: int
    sender: int
    heads: tuple[HeadRun, ...]


def parts_of(receivers: Sequence[Heads], senders: Sequence[Heads]) -> list[HeadPart]:
    """Assign every receiving rank's heads in every layer to senders.

    Raises ``ValueError`` for a head that no sender has.
    """
    layers = len(receivers[0])
    by_pair: dict[tuple[int, int], list[range]] = {}
    for layer in range(layers):
        needs, holdings = ([heads[layer] for heads in ranks] for ranks in (receivers, senders))
        for receiver, sender, heads in _assigned(needs, holdings):
            by_layer = by_pair.setdefault((receiver, sender), [range(0)] * layers)
            by_layer[layer] = heads
    return [HeadPart(*pair, runs_of(by_pair[pair])) for pair in sorted(by_pair)]


def _assigned(
    receivers: Sequence[range], senders: Sequence[range]
) -> Iterator[tuple[int, int, range]]:
    """Yield receiver, sender and heads for one layer."""
    for receiver, needs in enumerate(receivers):
        first = needs.start
        while first < needs.stop:
            sender = _sender_of(first, receiver, receivers, senders)
            end = min(needs.stop, senders[sender].stop)
            yield receiver, sender, range(first, end)
            first = end


def _sender_of(
    head: int, receiver: int, receivers: Sequence[range], senders: Sequence[range]
) -> int:
    holders = [rank for rank, heads in enumerate(senders) if head in heads]
    if not holders:
        raise ValueError(f"no sending rank holds head {head}")
    if len(holders) == 1:
        return holders[0]
    needers = [rank for rank, needs in enumerate(receivers) if head in needs]
    return holders[needers.index(receiver) * len(holders) // len(needers)]


def runs_of(heads: Iterable[range]) -> tuple[HeadRun, ...]:
    """Heads by layer, as runs of layers with equal heads."""
    runs = ((run, len(list(layers))) for run, layers in groupby(heads))
    return tuple(HeadRun(count, run.start, run.stop) for run, count in runs)
