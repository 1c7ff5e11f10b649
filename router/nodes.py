"""The nodes that this router knows: who is there, how busy, and the calls that run on each.

Owns the connections. A node is one start of a process, (id, epoch): when the same id joins with a
new epoch, the old one is lost, and with it the calls that it held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from ..proto import tandem_pb2 as pb
from ..proto.tandem_pb2_grpc import DecodeStub
from ..shared.lock import OPEN, Lock
from ..shared.telemetry import logger
from .placement import NodeView

log = logger("router")

# Samples kept of one heartbeat.
MAX_METRICS = 4096

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    # A node that restarts on its address is a new node here; it must not wait for a backoff.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class Node:
    """One start of one node. ``lost`` is final."""

    def __init__(
        self, request: pb.JoinRequest, address: str, now: float, lock: Lock = OPEN
    ) -> None:
        self.node_id = request.node_id
        self.epoch = request.epoch
        self.role = request.role
        self.address = address
        self.model = request.model
        self.load = request.load
        self.metrics: tuple[pb.Metric, ...] = ()
        self.draining = False
        self.left = False
        self.to_drain = False  # an operator asked for it
        self.lost = False
        self.last_seen = now
        self.inflight = 0
        self._calls: set[Any] = set()
        self._lock = lock
        self._channel: grpc.aio.Channel | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.node_id, self.epoch

    def info(self) -> pb.NodeInfo:
        """What an operator may see."""
        return pb.NodeInfo(
            node_id=self.node_id,
            epoch=self.epoch,
            role=self.role,
            address=self.address,
            draining=self.draining,
            load=self.load,
            requests=self.inflight,
        )

    def view(self) -> NodeView:
        """What placement may know."""
        return NodeView(
            node_id=self.node_id,
            epoch=self.epoch,
            address=self.address,
            prefill=self.role == pb.ROLE_PREFILL,
            draining=self.draining,
            running=self.load.running,
            waiting=self.load.waiting,
            inflight=self.inflight,
            queued_prefill_tokens=self.load.queued_prefill_tokens,
            prefill_tokens_per_second=self.load.prefill_tokens_per_second,
        )

    def generate(self, request: pb.GenerateRequest, timeout: float) -> Any:
        """Start a call; give it back with ``done``."""
        if self._channel is None:
            self._channel = self._lock.channel(self.address, CHANNEL_OPTIONS)
        call = self._lock.stub(DecodeStub, self._channel).Generate(request, timeout=timeout)
        self._calls.add(call)
        self.inflight += 1
        return call

    def done(self, call: Any) -> None:
        """The call is over, or is to be: cancelling one that has ended does nothing."""
        call.cancel()
        self._calls.discard(call)
        self.inflight -= 1

    def drain(self) -> None:
        """From now on it gets no work, and its next heartbeat tells it so."""
        log.info("node %s is to drain", self.node_id)
        self.to_drain = self.draining = True

    def lose(self) -> None:
        """The process is gone: whoever waits for it must hear at once."""
        self.lost = True
        for call in tuple(self._calls):
            call.cancel()

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=None)


class NodeTable:
    """All nodes by id. Time comes from ``clock``, so that tests need not wait."""

    def __init__(
        self, timeout: float, clock: Callable[[], float] = time.monotonic, lock: Lock = OPEN
    ) -> None:
        self._timeout = timeout
        self._clock = clock
        self._lock = lock
        self._nodes: dict[str, Node] = {}
        self._lost: list[Node] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(tuple(self._nodes.values()))

    def get(self, node_id: str, epoch: int) -> Node | None:
        """The node, if it is still this start of it."""
        node = self._nodes.get(node_id)
        return node if node is not None and node.epoch == epoch else None

    def join(self, request: pb.JoinRequest, address: str) -> Node:
        """A node announces itself; joining again with the same epoch keeps its calls."""
        node = self.get(request.node_id, request.epoch)
        if node is not None and node.address == address and node.role == request.role:
            node.load, node.last_seen = request.load, self._clock()
            node.left = False
            node.draining = node.to_drain
            return node
        self._remove(request.node_id, "was replaced by a new start")
        node = self._nodes[request.node_id] = Node(request, address, self._clock(), self._lock)
        role = "prefill" if request.role == pb.ROLE_PREFILL else "decode"
        log.info("%s node %s joined from %s", role, node.node_id, address)
        return node

    def named(self, node_id: str) -> Node | None:
        """The node of this name, whichever start of it."""
        return self._nodes.get(node_id)

    def heartbeat(self, request: pb.HeartbeatRequest) -> Node | None:
        """The node, or ``None`` when it is not known (any more)."""
        node = self.get(request.node_id, request.epoch)
        if node is None:
            return None
        node.last_seen = self._clock()
        node.load = request.load
        node.draining = request.draining or node.left or node.to_drain
        node.metrics = tuple(request.metrics[:MAX_METRICS])
        return node

    def leave(self, node_id: str, epoch: int) -> None:
        """It finishes what it has, and gets no more."""
        node = self.get(node_id, epoch)
        if node is not None:
            log.info("node %s is leaving", node_id)
            node.draining = node.left = True

    def expire(self, held_up: float = 0.0) -> None:
        """Lose the nodes whose heartbeats have stopped.

        ``held_up`` is how many seconds the router itself just stood still: what came meanwhile is
        still unread, and no sign of a node's silence.
        """
        horizon = self._clock() - self._timeout - held_up
        for node in tuple(self._nodes.values()):
            # One that has left owes no heartbeats while it finishes; gRPC's own pings watch it.
            if node.last_seen < horizon and not (node.left and node.inflight):
                gone = "has left" if node.draining else f"was silent for {self._timeout:g} s"
                self._remove(node.node_id, gone)

    def decode_ready(self) -> bool:
        return any(n.role == pb.ROLE_DECODE and not n.draining for n in self._nodes.values())

    def views(self) -> list[NodeView]:
        return [node.view() for node in self._nodes.values()]

    async def close_lost(self) -> None:
        """Close the connections of lost nodes, after their calls were cancelled."""
        lost, self._lost = self._lost, []
        for node in lost:
            await node.close()

    async def close(self) -> None:
        for node_id in tuple(self._nodes):
            self._remove(node_id, "was dropped: the router stops")
        await self.close_lost()

    def _remove(self, node_id: str, why: str) -> None:
        node = self._nodes.pop(node_id, None)
        if node is not None:
            log.info("node %s %s", node_id, why)
            node.lose()
            self._lost.append(node)
