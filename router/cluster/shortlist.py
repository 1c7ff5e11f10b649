"""The nodes that placement compares: all of a small cluster, a few tens of a large one.

They are those that hold the most of the prompt, and the least loaded of a window of each kind and
version of nodes, a different window for each prompt. If no node of the window has room, all nodes
of that kind are searched.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from ..placement.node_prefixes import PromptKeys
from ..placement.policies import ASSUMED_TOKENS_PER_SECOND, SEQUENCE_TOKENS
from ..placement.prefix_table import PrefixTable
from .node import Node

# Up to this many nodes, all are compared.
FEW = 64
# Nodes of each kind and version that are looked at for one prompt, and how many are compared.
WINDOW = 64
LIGHTEST = 8
HOLDING = 12

Excluded = frozenset[tuple[str, int]]


def shortlist(
    kinds: Iterable[Sequence[Node]],
    prefix_table: PrefixTable[Node],
    prompt: PromptKeys,
    turn: int,
    exclude: Excluded,
    needs: frozenset[str] = frozenset(),
) -> list[Node]:
    """The nodes to compare. ``kinds`` has all nodes, those of one role and version together.
    ``needs``: the capabilities that the request needs."""

    def holds(node: Node, key: int) -> bool:
        return (
            not node.lost
            and node.supports(needs)
            and (key in node.prefixes or node.inflight_load.expects(key))
        )

    chosen = dict.fromkeys(prefix_table.find(prompt.sample, holds, HOLDING, turn))
    for nodes in kinds:
        able = [node for node in nodes if node.supports(needs)] if needs else nodes
        chosen |= dict.fromkeys(_lightest(able, len(prompt.tokens), turn, exclude))
    return list(chosen)


def _lightest(nodes: Sequence[Node], tokens: int, turn: int, exclude: Excluded) -> list[Node]:
    """The nodes that would compute an unknown prompt soonest, and those with the fewest sequences,
    because policies differ in what they compare."""
    few: list[Node] = []
    for part in _parts(nodes, turn):
        usable = [node for node in part if not node.draining and node.key not in exclude]
        # An unreachable node has little to do, and must not be the only candidate.
        usable = [node for node in usable if not node.ejection.ejected] or usable
        rates = [node.rate for node in usable if node.rate]
        pace = sum(rates) / len(rates) if rates else ASSUMED_TOKENS_PER_SECOND

        def wait(node: Node, pace: float = pace) -> tuple[bool, float]:
            queued = node.inflight_load.queued_tokens
            if not node.is_prefill:
                queued += node.sequences * SEQUENCE_TOKENS
            return not node.has_room(tokens), (queued + tokens) / (node.rate or pace)

        few = heapq.nsmallest(LIGHTEST, usable, key=wait)
        few += heapq.nsmallest(LIGHTEST // 2, usable, key=_by_sequences)
        if any(node.has_room(tokens) for node in few):
            break
    return few


def _by_sequences(node: Node) -> int:
    return node.sequences


def _parts(nodes: Sequence[Node], turn: int) -> Iterator[Sequence[Node]]:
    """A window that moves on with each turn, then all nodes."""
    if len(nodes) > WINDOW:
        start = turn * WINDOW % len(nodes)
        yield [*nodes[start : start + WINDOW], *nodes[: max(0, start + WINDOW - len(nodes))]]
    yield nodes
