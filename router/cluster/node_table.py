"""The table of all nodes of a router. It owns the nodes and thereby their channels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import Counter

from ...proto import tandem_pb2 as pb
from ...proto.roles import role_name
from ...shared.security.credentials import INSECURE, Credentials
from ...shared.telemetry.logs import logger
from ..placement.node_prefixes import PromptKeys
from ..placement.place import NodeView, Placement, Policy, place
from ..placement.policies import round_robin
from ..placement.prefix_table import PrefixTable
from ..placement.recent_prefills import RecentPrefills
from .absent_nodes import AbsentNodes
from .node import Node
from .retained_prefixes import RetainedPrefixes
from .shortlist import FEW, Excluded, Roster, shortlist

log = logger("router")

# If at least this many nodes fall silent at once, and more than this fraction of all, the nodes are
# hardly the cause. They are lost only after PATIENCE times the usual timeout; RPCs to dead nodes
# fail sooner anyway.
MANY_SILENT = 16
FRACTION_SILENT = 0.2
PATIENCE = 3.0


class NodeTable:
    """All nodes by id. Time comes from ``clock``, so that tests need not wait."""

    def __init__(
        self,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        credentials: Credentials = INSECURE,
    ) -> None:
        self._timeout = timeout
        self._clock = clock
        self.credentials = credentials
        self._nodes: dict[str, Node] = {}
        self._roster = Roster()
        self._prefix_table: PrefixTable[Node] = PrefixTable()
        self._retained = RetainedPrefixes(clock)
        self._lost: list[Node] = []
        self._many_silent = False
        self._turns = 0
        self.absent = AbsentNodes(clock)
        # Called with a node that a request did not reach.
        self.on_doubt: Callable[[Node], None] = lambda node: None
        self.prefills = RecentPrefills(clock)
        self.ejections = Counter(
            "tandem_decode_nodes_ejected",
            "Ejections of decode nodes that could not be reached, by reason.",
            ["reason"],
            registry=None,
        )
        self.migrations = Counter(
            "tandem_requests_migrated",
            "Requests whose output another decode node continued, by the reason: the first node "
            "failed, or its drain timed out.",
            ["reason"],
            registry=None,
        )
        for reason in ("failed", "draining"):
            self.migrations.labels(reason)

    # -- lookup ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(tuple(self._nodes.values()))

    def __getitem__(self, node_id: str) -> Node:
        """A node of the last snapshot; nothing may change the table in between."""
        return self._nodes[node_id]

    def get(self, node_id: str, epoch: int) -> Node | None:
        """The node, if this start of it is the current one."""
        node = self._nodes.get(node_id)
        return node if node is not None and node.epoch == epoch else None

    def find(self, node_id: str) -> Node | None:
        """The node of this name, with any epoch."""
        return self._nodes.get(node_id)

    def serves(self, group: str) -> bool:
        """True if a prefill or decode node of this group is present."""
        return self._roster.serves(group)

    def decode_ready(self) -> bool:
        """True if a decode node takes work."""
        return any(n.role == pb.ROLE_DECODE and not n.draining for n in self._nodes.values())

    def decode_reachable(self) -> bool:
        """True if a decode node takes work and this router can reach it."""
        return any(not n.is_prefill and n.state == "ready" for n in self._nodes.values())

    def infos(self) -> list[pb.NodeInfo]:
        """All nodes as operators see them, by name, with decode nodes last."""
        nodes = sorted(self._nodes.values(), key=lambda node: (node.role, node.node_id))
        return [node.info(self._clock()) for node in nodes]

    def prefix_version(self, node_id: str, epoch: int) -> int:
        """The version of this node's prefixes that the router has; 0 without any."""
        node = self.get(node_id, epoch)
        return node.prefixes.version if node is not None else 0

    def now(self) -> float:
        """The time by the clock of ``Node.last_seen``."""
        return self._clock()

    # -- placement ---------------------------------------------------------------------------

    def place(
        self, prompt: PromptKeys, policy: Policy, exclude: Excluded = frozenset()
    ) -> Placement | None:
        """The next placement of a prompt; ``None`` if no decode node can take it. ``exclude`` has
        the nodes that have failed it."""
        turn, self._turns = self._turns, self._turns + 1
        if policy is round_robin:
            views = [node.view(prompt) for node in self._roster.in_turn(turn, exclude)]
            return Placement(views[0], tuple(views[1:])) if views else None
        views = self.views(prompt, turn, exclude)
        return place(views, prompt.tokens, policy, turn=turn, salt=prompt.salt, exclude=exclude)

    def views(
        self, prompt: PromptKeys, turn: int = 0, exclude: Excluded = frozenset()
    ) -> list[NodeView]:
        """The candidates for a prompt: every node, or a shortlist of very many."""
        if len(self._nodes) <= FEW:
            return [node.view(prompt) for node in self._nodes.values()]
        few = shortlist(self._roster.kinds, self._prefix_table, prompt, turn, exclude)
        return [node.view(prompt) for node in few]

    def back_off(self, node: Node, remote: Any, reason: str) -> None:
        """Back off from a node after a request did not reach it or got no reply."""
        pause = node.ejection.on_failure(remote)
        if pause:
            self.ejections.labels(reason).inc()
            log.warning(
                "node %s is ejected for %g s: %s, %.1f s after its last heartbeat",
                node.node_id,
                pause,
                reason,
                self._clock() - node.last_seen,
            )
        self.on_doubt(node)

    def set_unreachable(self, node: Node, problem: str) -> None:
        """Set the reason why a node cannot be reached; empty once it replies."""
        if problem and problem != node.unreachable:
            log.warning("node %s is unreachable: %s", node.node_id, problem)
        if node.unreachable and not problem:
            log.info("node %s can be reached again", node.node_id)
        node.set_unreachable(problem)

    # -- membership --------------------------------------------------------------------------

    def join(self, request: pb.JoinRequest, address: str) -> Node:
        """Add a node. One that joins again with the same epoch keeps its requests."""
        node = self.get(request.node_id, request.epoch)
        if node is not None and node.address == address and node.role == request.role:
            node.report(request.load, request.prefixes)
            node.last_seen = self._clock()
            node.left = False
            node.draining = node.is_withdrawn
            return node
        previous = self._nodes.get(request.node_id)
        if previous is not None and previous.epoch != request.epoch and not previous.finished:
            self._lose(previous, "died and was restarted", "died without notice")
        reason = "was replaced by a restart or a change of role"
        self._remove(request.node_id, reason, keep=node is not None)
        return self._add(request, address)

    def _add(self, request: pb.JoinRequest, address: str) -> Node:
        node = Node(request, address, self._clock(), self.credentials, self._clock)
        self._nodes[request.node_id] = node
        retained = self._retained.take(node.key)
        if retained is not None:
            node.prefixes = retained
            retained.hand_to(node)
        else:
            node.prefixes.show_in(self._prefix_table.column(node))
        self._roster.add(node)
        node.report(request.load, request.prefixes)
        log.info("%s node %s joined from %s", role_name(node.role), node.node_id, address)
        self.absent.mark_returned(node.node_id)
        return node

    def heartbeat(self, request: pb.HeartbeatRequest) -> Node | None:
        """Apply a node's report; ``None`` if the table has no such node."""
        node = self.get(request.node_id, request.epoch)
        if node is None:
            return None
        node.last_seen = self._clock()
        node.report(request.load, request.prefixes)
        node.draining = request.draining or node.left or node.is_withdrawn
        return node

    def leave(self, node_id: str, epoch: int, failure: str = "") -> None:
        """Remove a node that ends, as lost if it ends with a failure. Without one, it stays until
        this router has read the rest of its requests."""
        node = self.get(node_id, epoch)
        if node is None:
            return
        if failure:
            self._lose(node, f"ends: {failure}", failure, failed=True)
            return
        if not node.inflight_requests:
            self._remove(node_id, "has left")
            return
        log.info("node %s is leaving", node_id)
        node.draining = node.left = True

    def expire(self, held_up: float = 0.0) -> None:
        """Remove the nodes that have left, and those whose heartbeats have stopped, as lost unless
        they have finished.

        ``held_up`` is the time in seconds for which the router itself just stood still. Messages
        that arrived meanwhile are still unread, so it does not count as silence of a node.
        """
        now = self._clock()
        for node in self._nodes.values():
            node.last_seen = min(now, node.last_seen + held_up)
        self._retained.expire()
        for node in self:
            if node.left and not node.inflight_requests:
                self._remove(node.node_id, "has left")
        patience = self._patience(now)
        for node in self._silent(now - patience):
            if node.finished:
                self._remove(node.node_id, "has left")
                continue
            reason = f"was silent for {patience:g} s"
            self._lose(node, reason, reason, keep=True)

    def _lose(
        self, node: Node, event: str, reason: str, *, failed: bool = False, keep: bool = False
    ) -> None:
        """Remove a node that should be here, and record the reason."""
        self._remove(node.node_id, event, logging.WARNING, keep=keep)
        self.absent.add(
            pb.AbsentNode(
                node_id=node.node_id,
                role=node.role,
                address=node.address,
                reason=reason,
                failed=failed,
            )
        )

    def _patience(self, now: float) -> float:
        """The seconds of silence after which a node is lost."""
        count = len(self._silent(now - self._timeout))
        many = count >= MANY_SILENT and count > FRACTION_SILENT * len(self._nodes)
        patience = self._timeout * (PATIENCE if many else 1.0)
        if many and not self._many_silent:
            log.warning(
                "%d of %d nodes are silent at once: their heartbeats may be delayed here or on the "
                "way, so nodes are lost only after %g s",
                count,
                len(self._nodes),
                patience,
            )
        self._many_silent = many
        return patience

    def _silent(self, horizon: float) -> list[Node]:
        return [
            node
            for node in self._nodes.values()
            # A node that has left sends no heartbeats while it finishes; gRPC's pings watch it.
            if node.last_seen < horizon and not node.left
        ]

    def _remove(
        self, node_id: str, reason: str, level: int = logging.INFO, *, keep: bool = False
    ) -> None:
        """Remove a node if it is present. ``keep`` its prefixes if the same start may return."""
        node = self._nodes.pop(node_id, None)
        if node is None:
            return
        log.log(level, "%s node %s %s", role_name(node.role), node_id, reason)
        node.lose()
        self._lost.append(node)
        self._roster.remove(node)
        if keep:
            self._retained.retain(node.key, node.prefixes)
        else:
            node.prefixes.hide()

    # -- closing -----------------------------------------------------------------------------

    async def close_lost(self) -> None:
        """Close the connections of lost nodes, whose requests have been cancelled."""
        lost, self._lost = self._lost, []
        for node in lost:
            await node.close()

    async def close(self) -> None:
        for node_id in tuple(self._nodes):
            self._remove(node_id, "was dropped: the router stops")
        await self.close_lost()
