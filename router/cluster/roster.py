"""The nodes of a table in the orders that placement needs, kept from one prompt to the next.

What depends only on which nodes there are, is computed anew only after one has come or gone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..placement.place import MAX_PREFILL_CANDIDATES
from .node import Node
from .shortlist import Excluded, usable

Needs = frozenset[str]


class Roster:
    """All nodes of a table, by role and version. ``needs`` are the capabilities that a request
    needs."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[bool, str], list[Node]] = {}
        self._able: dict[Needs, list[list[Node]]] = {}
        self._by_name: dict[tuple[Needs, bool, str], list[Node]] = {}

    def add(self, node: Node) -> None:
        self._kinds.setdefault((node.is_prefill, node.group), []).append(node)
        self._changed()

    def remove(self, node: Node) -> None:
        kind = self._kinds[node.is_prefill, node.group]
        kind.remove(node)
        if not kind:
            del self._kinds[node.is_prefill, node.group]
        self._changed()

    def serves(self, group: str) -> bool:
        """True if a prefill or decode node of this group is present."""
        return any((prefill, group) in self._kinds for prefill in (False, True))

    def kinds(self, needs: Needs) -> Collection[Sequence[Node]]:
        """The nodes that support ``needs``, in a list for each role and version."""
        if not needs:
            return self._kinds.values()
        if needs not in self._able:
            kinds = self._kinds.values()
            self._able[needs] = [[n for n in nodes if n.supports(needs)] for nodes in kinds]
        return self._able[needs]

    def in_turn(self, turn: int, exclude: Excluded, needs: Needs) -> list[Node]:
        """The decode node whose turn it is, and its prefill nodes; empty if no decode node can
        take work."""
        decode = usable(self._named(needs), exclude)
        if not decode:
            return []
        chosen = decode[turn % len(decode)]
        helpers = [
            node
            for node in self._named(needs, prefill=True, group=chosen.group)
            if not node.draining and node.key not in exclude
        ]
        first = turn % max(1, len(helpers))
        return [chosen, *(helpers[first:] + helpers[:first])[:MAX_PREFILL_CANDIDATES]]

    def _named(self, needs: Needs, *, prefill: bool = False, group: str = "") -> list[Node]:
        """The decode nodes, or the prefill nodes of a group, by name."""
        key = needs, prefill, group
        if key not in self._by_name:
            kinds = [
                nodes
                for (is_prefill, of_group), nodes in self._kinds.items()
                if is_prefill == prefill and (not prefill or of_group == group)
            ]
            able = [node for nodes in kinds for node in nodes if node.supports(needs)]
            self._by_name[key] = sorted(able, key=lambda node: node.node_id)
        return self._by_name[key]

    def _changed(self) -> None:
        self._able.clear()
        self._by_name.clear()
