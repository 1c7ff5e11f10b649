"""The nodes that placement compares: all of a small cluster, a few tens of a large one.

They are those that hold the most of the prompt, and the least loaded of a window of each kind and
version of nodes, a different window for each prompt. If no node of the window has room, all nodes
of that kind are searched. Round robin compares nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter

from ..placement.node_prefixes import PromptKeys
from ..placement.place import MAX_PREFILL_CANDIDATES
from ..placement.policies import ASSUMED_TOKENS_PER_SECOND, SEQUENCE_TOKENS
from ..placement.prefix_table import PrefixTable
from .node import Node

# Up to this many nodes, all are compared.
FEW = 64
# Nodes of each kind and version that are looked at for one prompt, and how many are compared.
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
    """The nodes to compare. ``kinds`` has those of one role and version together."""
    chosen = dict.fromkeys(prefix_table.find(prompt.sample, Node.holds, HOLDING, turn))
    for nodes in kinds:
        chosen |= dict.fromkeys(_lightest(nodes, len(prompt.tokens), turn, exclude))
    return list(chosen)


def usable(nodes: Iterable[Node], exclude: Excluded) -> list[Node]:
    """The nodes that may be chosen. An unreachable one has little to do, and must not be the only
    candidate unless all are."""
    able = [node for node in nodes if not node.draining]
    if exclude:
        able = [node for node in able if node.key not in exclude]
    return [node for node in able if not node.ejected] or able


def _lightest(nodes: Sequence[Node], tokens: int, turn: int, exclude: Excluded) -> list[Node]:
    """The nodes that would compute an unknown prompt soonest, and those with the fewest sequences,
    because policies differ in what they compare."""
    few: list[Node] = []
    for part in _parts(nodes, turn):
        able = usable(part, exclude)
        rates = [node.rate for node in able if node.rate]
        pace = sum(rates) / len(rates) if rates else ASSUMED_TOKENS_PER_SECOND

        def wait(node: Node, pace: float = pace) -> tuple[bool, float]:
            load = node.inflight_load
            work = node.queued_tokens + tokens
            if not node.is_prefill:
                work += node.sequences * SEQUENCE_TOKENS
            full = load.room_tokens is not None and load.room_tokens < tokens
            return full, work / (node.rate or pace)

        few = sorted(able, key=wait)[:LIGHTEST]
        few += sorted(able, key=_SEQUENCES)[: LIGHTEST // 2]
        if any(node.has_room(tokens) for node in few):
            break
    return few


def _parts(nodes: Sequence[Node], turn: int) -> Iterator[Sequence[Node]]:
    """A window that moves on with each turn, then all nodes."""
    if len(nodes) > WINDOW:
        start = turn * WINDOW % len(nodes)
        yield [*nodes[start : start + WINDOW], *nodes[: max(0, start + WINDOW - len(nodes))]]
    yield nodes


class Roster:
    """All nodes of a table, by role and version. What depends only on which nodes there are is
    computed anew only after one has come or gone."""

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
        decode = usable(self._named(), exclude)
        if not decode:
            return []
        chosen = decode[turn % len(decode)]
        helpers = [
            node
            for node in self._named(prefill=True, group=chosen.group)
            if not node.draining and node.key not in exclude
        ]
        first = turn % max(1, len(helpers))
        return [chosen, *(helpers[first:] + helpers[:first])[:MAX_PREFILL_CANDIDATES]]

    def _named(self, *, prefill: bool = False, group: str = "") -> list[Node]:
        """The decode nodes, or the prefill nodes of a group, by name."""
        key = prefill, group
        if key not in self._by_name:
            named = [
                node
                for (is_prefill, of_group), nodes in self._kinds.items()
                if is_prefill == prefill and (not prefill or of_group == group)
                for node in nodes
            ]
            self._by_name[key] = sorted(named, key=lambda node: node.node_id)
        return self._by_name[key]
