"""Nodes that should be present and are not: refused when they tried to join, or lost.

Those that were lost and are back stay on the list, since a supervisor restarts a node before
anybody can look why it had ended; they no longer count as absent.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import prometheus_client

from ...proto import tandem_pb2 as pb
from ...proto.roles import ROLES, role_name

# Operators look soon after something went wrong; an older entry may have been fixed under another
# name.
REMEMBERED_SECONDS = 600.0
# Entries, unless ``most`` is set to more; and characters of a reason, which may quote a node.
MAX_ABSENT = 1024
MAX_REASON = 1024


class AbsentNodes:
    """The latest entry of each name, at most ``most``. Time comes from ``clock``.

    ``lost`` and ``refused`` count them by role, for a metrics page to register.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.lost = _counter("tandem_nodes_lost", "Nodes that fell silent or died.")
        self.refused = _counter("tandem_nodes_refused", "Joins that the router refused.")
        self.most = MAX_ABSENT
        self._nodes: dict[str, tuple[float, pb.AbsentNode]] = {}  # the oldest first

    def add(self, node: pb.AbsentNode) -> None:
        (self.refused if node.refused else self.lost).labels(role_name(node.role)).inc()
        self._nodes.pop(node.node_id, None)
        if self.full:
            del self._nodes[next(iter(self._nodes))]
        node.reason = node.reason[:MAX_REASON]
        self._nodes[node.node_id] = self._clock(), node

    @property
    def full(self) -> bool:
        """True if the next entry replaces the oldest."""
        horizon = self._clock() - REMEMBERED_SECONDS
        while self._nodes and next(iter(self._nodes.values()))[0] <= horizon:
            del self._nodes[next(iter(self._nodes))]
        return len(self._nodes) >= self.most

    def reason(self, node_id: str) -> str:
        """The reason why this node is absent; empty if it has no entry."""
        at, node = self._nodes.get(node_id, (0.0, pb.AbsentNode()))
        return node.reason if self._clock() - at < REMEMBERED_SECONDS else ""

    def returned(self, node_id: str) -> None:
        """Note that a node is present again."""
        _, node = self._nodes.get(node_id, (0.0, pb.AbsentNode()))
        if node.refused:
            del self._nodes[node_id]
        node.returned = True

    def tally(self) -> Counter[tuple[str, str]]:
        """Number of nodes by role and state, ``lost`` or ``refused``."""
        return Counter(
            (role_name(node.role), "refused" if node.refused else "lost")
            for node in self.all()
            if not node.returned
        )

    def all(self) -> list[pb.AbsentNode]:
        """All entries with their age, the oldest first."""
        now = self._clock()
        recent = [(at, node) for at, node in self._nodes.values() if now - at < REMEMBERED_SECONDS]
        for at, node in recent:
            node.seconds_ago = now - at
        return [node for _, node in recent]


def _counter(name: str, meaning: str) -> prometheus_client.Counter:
    """A counter with a series for each role from the start, so that its first event is an
    increase."""
    made = prometheus_client.Counter(name, meaning, ["role"], registry=None)
    for role in ROLES.values():
        made.labels(role)
    return made
