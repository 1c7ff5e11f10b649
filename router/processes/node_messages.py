"""The nodes as the keeper tells its workers of them: joins, heartbeats, states and losses."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

from ...proto import tandem_pb2 as pb
from ..cluster.inflight import PlacedLoad
from ..cluster.node import Node
from ..cluster.node_commands import NodeCommands
from ..cluster.node_table import NodeTable
from ..options import RouterOptions
from .process_link import Topic

Publish = Callable[[Topic, bytes], None]
# What is placed on nodes, by their names and epochs.
Loads = dict[tuple[str, int], PlacedLoad]


class KeptNodes(NodeTable):
    """The keeper's table, which publishes each change."""

    def __init__(self, publish: Publish, timeout: float, **more: Any) -> None:
        super().__init__(timeout, **more)
        self._publish = publish

    def join(self, request: pb.JoinRequest, address: str) -> Node:
        node = super().join(request, address)
        for topic, body in introduce(node):
            self._publish(topic, body)
        return node

    def heartbeat(self, request: pb.HeartbeatRequest) -> Node | None:
        body = request.SerializeToString()  # before its parts are moved out
        node = super().heartbeat(request)
        if node is not None:
            self._publish(Topic.HEARTBEAT, body)
        return node

    def leave(self, node_id: str, epoch: int, failure: str = "") -> None:
        super().leave(node_id, epoch, failure)
        node = self.get(node_id, epoch)
        if node is not None:
            self._publish(Topic.STATE, state_of(node))

    def found_unreachable(self, node: Node, problem: str) -> None:
        super().found_unreachable(node, problem)
        self._publish(Topic.STATE, state_of(node))

    def _remove(
        self, node_id: str, reason: str, level: int = logging.INFO, *, keep: bool = False
    ) -> None:
        node = self.named(node_id)
        super()._remove(node_id, reason, level, keep=keep)
        if node is not None:
            body = json.dumps([node_id, node.epoch, keep])
            self._publish(Topic.LOST, body.encode())


class KeptCommands(NodeCommands):
    """Operators' commands, whose effects workers know at once."""

    def __init__(self, publish: Publish, options: RouterOptions, nodes: NodeTable) -> None:
        super().__init__(options, nodes)
        self._publish = publish

    def drain(self, node_id: str, seconds: float | None) -> None:
        super().drain(node_id, seconds)
        self._publish(Topic.STATE, state_of(self._commanded(node_id)))

    def set_role(self, node_id: str, role: pb.Role, *, force: bool) -> None:
        super().set_role(node_id, role, force=force)
        self._publish(Topic.STATE, state_of(self._commanded(node_id)))


def introduce(node: Node) -> list[tuple[Topic, bytes]]:
    """The messages that tell all of a node."""
    joined = Topic.JOIN, node.introduction().SerializeToString()
    return [joined, (Topic.STATE, state_of(node))]


def state_of(node: Node) -> bytes:
    state = {
        "draining": node.draining,
        "left": node.left,
        "to_drain": node.to_drain,
        "drain_seconds": node.drain_seconds,
        "next_role": node.next_role,
    }
    return json.dumps([node.node_id, node.epoch, state, node.unreachable]).encode()


def take_state(nodes: NodeTable, body: bytes) -> None:
    node_id, epoch, state, unreachable = json.loads(body)
    node = nodes.get(node_id, epoch)
    if node is not None:
        node.reach(unreachable)
        for name, value in state.items():
            setattr(node, name, value)


def pack_loads(loads: Loads) -> list[Any]:
    return [[*key, *placed] for key, placed in loads.items()]


def unpack_loads(packed: Iterable[Any]) -> Loads:
    return {(name, epoch): PlacedLoad(*numbers) for name, epoch, *numbers in packed}


class PlacedLoads:
    """What each worker has placed on the nodes, for the others; ``active`` are its requests."""

    def __init__(self) -> None:
        self._of: dict[int, Loads] = {}
        self._active: dict[int, int] = {}

    def take(self, worker: int, active: int, loads: Loads) -> None:
        """Take over what has changed; a node on which nothing is left is forgotten."""
        known = self._of.setdefault(worker, {})
        known |= loads
        for key in [key for key, placed in loads.items() if placed == PlacedLoad()]:
            del known[key]
        self._active[worker] = active

    def drop(self, worker: int) -> Loads:
        """Forget a worker that has ended; returns what it had placed."""
        self._active.pop(worker, None)
        return self._of.pop(worker, {})

    def active(self, *, without: int | None = None) -> int:
        return sum(count for worker, count in self._active.items() if worker != without)

    def sums(self, keys: Iterable[tuple[str, int]], *, without: int | None = None) -> Loads:
        """What all workers, or all but one, have placed on these nodes."""
        others = [loads for worker, loads in self._of.items() if worker != without]
        return {key: _sum(loads.get(key, PlacedLoad()) for loads in others) for key in keys}

    def keys(self) -> set[tuple[str, int]]:
        return {key for loads in self._of.values() for key in loads}


def _sum(loads: Iterable[PlacedLoad]) -> PlacedLoad:
    calls = sequences = tokens = 0
    for load in loads:
        calls += load.calls
        sequences += load.sequences
        tokens += load.compute_tokens
    return PlacedLoad(calls, sequences, tokens)
