"""Nodes that should be there and are not: refused at the door, or fallen silent."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..proto import tandem_pb2 as pb

# An operator looks soon after something went wrong; what is older may have been put right under
# another name.
REMEMBERED_SECONDS = 600.0
MAX_ABSENT = 64


class Absent:
    """The latest word on each name. Time comes from ``clock``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes: dict[str, tuple[float, pb.AbsentNode]] = {}

    def add(self, node: pb.AbsentNode) -> None:
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

    def all(self) -> list[pb.AbsentNode]:
        """The oldest first, each with its age."""
        now = self._clock()
        recent = [(at, node) for at, node in self._nodes.values() if now - at < REMEMBERED_SECONDS]
        for at, node in recent:
            node.seconds_ago = now - at
        return [node for _, node in recent]
