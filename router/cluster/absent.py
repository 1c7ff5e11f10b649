"""Nodes that should be there and are not: refused at the door, or fallen silent."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import prometheus_client

from ...proto import tandem_pb2 as pb
from ...proto.roles import ROLES, role_name

# An operator looks soon after something went wrong; what is older may have been put right under
# another name.
REMEMBERED_SECONDS = 600.0
MAX_ABSENT = 64


class Absent:
    """The latest word on each name. Time comes from ``clock``.

    ``lost`` and ``refused`` count them by role; whoever has a page of metrics registers them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.lost = _counter("tandem_nodes_lost", "Nodes that fell silent or died.")
        self.refused = _counter("tandem_nodes_refused", "Joins that the router refused.")
        self._nodes: dict[str, tuple[float, pb.AbsentNode]] = {}

    def add(self, node: pb.AbsentNode) -> None:
        (self.refused if node.refused else self.lost).labels(role_name(node.role)).inc()
        self.came(node.node_id)
        if len(self._nodes) >= MAX_ABSENT:
            del self._nodes[next(iter(self._nodes))]
        self._nodes[node.node_id] = self._clock(), node

    def reason(self, node_id: str) -> str:
        """The latest word on this name; empty without one."""
        at, node = self._nodes.get(node_id, (0.0, pb.AbsentNode()))
        return node.reason if self._clock() - at < REMEMBERED_SECONDS else ""

    def came(self, node_id: str) -> None:
        """It is here now."""
        self._nodes.pop(node_id, None)

    def tally(self) -> Counter[tuple[str, str]]:
        """How many there are by role and state, ``lost`` or ``refused``."""
        return Counter(
            (role_name(node.role), "refused" if node.refused else "lost") for node in self.all()
        )

    def all(self) -> list[pb.AbsentNode]:
        """The oldest first, each with its age."""
        now = self._clock()
        recent = [(at, node) for at, node in self._nodes.values() if now - at < REMEMBERED_SECONDS]
        for at, node in recent:
            node.seconds_ago = now - at
        return [node for _, node in recent]


def _counter(name: str, meaning: str) -> prometheus_client.Counter:
    """With a series for each role from the start, so that the first one is an increase."""
    made = prometheus_client.Counter(name, meaning, ["role"], registry=None)
    for role in ROLES.values():
        made.labels(role)
    return made
