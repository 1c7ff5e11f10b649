"""The nodes that placement compares: all of a small cluster, a few tens of a large one.

These are the nodes that hold most of the prompt, and the least loaded in a window over each role
and version; the window moves with each prompt. If no node in the window has room, all nodes of that
kind are searched. Round robin compares nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter

from ..placement.node_prefixes import PromptKeys
from ..placement.place import MAX_PREFILL_CANDIDATES
from ..placement.policies import ASSUMED_TOKENS_PER_SECOND, SEQUENCE_TOKENS
from ..placement.prefix_table import PrefixTable
from .node import Node

# Up to this many nodes are all compared.
FEW = 64
# Nodes of each kind and version in a window, the least loaded of them to compare, and the nodes
# that hold most of the prompt.
WINDOW = 32
LIGHTEST = 8
HOLDING = 12

_SEQUENCES = attrgetter("sequences")

Excluded = frozenset[tuple[str, int]]


def shortlist(
    kinds: Iterable[Sequence[Node]],
    prefix_table: PrefixTable[Node],
    prompt: PromptKeys,
    turn: int,
    exclude: Excluded,
) -> list[Node]:
    """The nodes to compare. Each item of ``kinds`` has the nodes of one role and version."""
    candidates = dict.fromkeys(prefix_table.find(prompt.sample, Node.holds, HOLDING, turn))
    for nodes in kinds:
        candidates |= dict.fromkeys(_lightest(nodes, len(prompt.tokens), turn, exclude))
    return list(candidates)


def usable(nodes: Iterable[Node], exclude: Excluded) -> list[Node]:
    """The nodes that may be chosen. Unreachable ones look idle, and are candidates only if all
    are."""
    available = [node for node in nodes if not node.draining]
    if exclude:
        available = [node for node in available if node.key not in exclude]
    return [node for node in available if not node.ejected] or available


def _lightest(nodes: Sequence[Node], tokens: int, turn: int, exclude: Excluded) -> list[Node]:
    """The nodes that would compute an unknown prompt soonest, and those with the fewest sequences,
    since policies differ in what they compare."""
    lightest: list[Node] = []
    for part in _parts(nodes, turn):
        available = usable(part, exclude)
        rates = [node.rate for node in available if node.rate]
        pace = sum(rates) / len(rates) if rates else ASSUMED_TOKENS_PER_SECOND

        def wait(node: Node, pace: float = pace) -> tuple[bool, float]:
            load = node.inflight_load
            work = node.queued_tokens + tokens
            if not node.is_prefill:
                work += node.sequences * SEQUENCE_TOKENS
            full = load.room_tokens is not None and load.room_tokens < tokens
            return full, work / (node.rate or pace)

        lightest = sorted(available, key=wait)[:LIGHTEST]
        lightest += sorted(available, key=_SEQUENCES)[: LIGHTEST // 2]
        if any(node.has_room(tokens) for node in lightest):
            break
    return lightest


def _parts(nodes: Sequence[Node], turn: int) -> Iterator[Sequence[Node]]:
    """A window that moves with each turn, then all nodes."""
    if len(nodes) > WINDOW:
        start = turn * WINDOW % len(nodes)
        yield [*nodes[start : start + WINDOW], *nodes[: max(0, start + WINDOW - len(nodes))]]
    yield nodes


class Roster:
    """All nodes of a table, by role and version. What depends only on the set of nodes is
    recomputed only when it changes."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[bool, str], list[Node]] = {}
        self._by_name: dict[tuple[bool, str], list[Node]] = {}

    def add(self, node: Node) -> None:
        self._kinds.setdefault((node.is_prefill, node.group), []).append(node)
        self._by_name.clear()

    def remove(self, node: Node) -> None:
        kind = self._kinds[node.is_prefill, node.group]
        kind.remove(node)
        if not kind:
            del self._kinds[node.is_prefill, node.group]
        self._by_name.clear()

    def serves(self, group: str) -> bool:
        """True if a prefill or decode node of this group is present."""
        return any((prefill, group) in self._kinds for prefill in (False, True))

    @property
    def kinds(self) -> Collection[Sequence[Node]]:
        """The nodes, in a list for each role and version."""
        return self._kinds.values()

    def in_turn(self, turn: int, exclude: Excluded) -> list[Node]:
        """The decode node whose turn it is, and its prefill nodes; empty if no decode node can
        take work."""
        decode = usable(self._sorted(), exclude)
        if not decode:
            return []
        node = decode[turn % len(decode)]
        helpers = [
            each
            for each in self._sorted(prefill=True, group=node.group)
            if not each.draining and each.key not in exclude
        ]
        first = turn % max(1, len(helpers))
        return [node, *(helpers[first:] + helpers[:first])[:MAX_PREFILL_CANDIDATES]]

    def _sorted(self, *, prefill: bool = False, group: str = "") -> list[Node]:
        """The decode nodes, or the prefill nodes of a group, by name."""
        key = prefill, group
        if key not in self._by_name:
            selected = [
                node
                for (is_prefill, of_group), nodes in self._kinds.items()
                if is_prefill == prefill and (not prefill or of_group == group)
                for node in nodes
            ]
            self._by_name[key] = sorted(selected, key=lambda node: node.node_id)
        return self._by_name[key]
