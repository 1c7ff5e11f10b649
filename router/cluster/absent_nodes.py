"""Nodes that should be present and are not: refused when they tried to join, or lost.

A lost node that has returned stays on the list, since a supervisor restarts a node before anybody
can see why it ended; it no longer counts as absent.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import prometheus_client

from ...proto import tandem_pb2 as pb
from ...proto.roles import ROLES, role_name

# Operators look soon after a failure; an older one may have been fixed under another name.
RETENTION_SECONDS = 600.0
# Entries, unless ``capacity`` is raised, and characters of a reason, which may quote a node.
MAX_ABSENT = 1024
MAX_REASON = 1024


class AbsentNodes:
    """The latest entry of each name, at most ``capacity``. Time comes from ``clock``.

    ``lost`` and ``refused`` are counters by role, for a metrics page to register.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.lost = _counter("tandem_nodes_lost", "Nodes that fell silent or died.")
        self.refused = _counter("tandem_nodes_refused", "Joins that the router refused.")
        self.capacity = MAX_ABSENT
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
        oldest = self._clock() - RETENTION_SECONDS
        while self._nodes and next(iter(self._nodes.values()))[0] <= oldest:
            del self._nodes[next(iter(self._nodes))]
        return len(self._nodes) >= self.capacity

    def reason(self, node_id: str) -> str:
        """The reason why this node is absent; empty without an entry."""
        at, node = self._nodes.get(node_id, (0.0, pb.AbsentNode()))
        return node.reason if self._clock() - at < RETENTION_SECONDS else ""

    def mark_returned(self, node_id: str) -> None:
        """Note that a node is present again."""
        _, node = self._nodes.get(node_id, (0.0, pb.AbsentNode()))
        if node.refused:
            del self._nodes[node_id]
        node.returned = True

    def tally(self) -> Counter[tuple[str, str]]:
        """The number of nodes by role and state, ``lost`` or ``refused``."""
        return Counter(
            (role_name(node.role), "refused" if node.refused else "lost")
            for node in self.all()
            if not node.returned
        )

    def all(self) -> list[pb.AbsentNode]:
        """All entries with their age, the oldest first."""
        now = self._clock()
        recent = [(at, node) for at, node in self._nodes.values() if now - at < RETENTION_SECONDS]
        for at, node in recent:
            node.seconds_ago = now - at
        return [node for _, node in recent]


def _counter(name: str, description: str) -> prometheus_client.Counter:
    """A counter with a series for each role from the start, so that its first event is an
    increase."""
    counter = prometheus_client.Counter(name, description, ["role"], registry=None)
    for role in ROLES.values():
        counter.labels(role)
    return counter
