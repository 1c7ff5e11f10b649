"""Checks that this router reaches a node at the address that the node announces.

Heartbeats do not show this, since they come from the node. So the router probes a node before
admitting it, and again after a request did not reach it, until it replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.tandem_pb2_grpc import DecodeStub, PrefillStub
from ...shared.errors import PeerRefusedError
from ...shared.process.backoff import Backoff
from ...shared.security.credentials import Credentials
from ..node_streams.connection import CHANNEL_OPTIONS
from .node import Node
from .node_table import NodeTable

RPC_SECONDS = 2.0
# At a time, to bound the connections when a thousand nodes join at once.
MAX_RPCS = 256
FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 3.0


# For a node that no router has reached yet.
REMEDY = (
    "let it listen where the router can reach it (--host), or name the address that leads there "
    "(--advertise)"
)


class UnreachedError(Exception):
    """Nothing at a node's address replies as a node: the ``problem``. ``gone`` if no connection can
    be made, so no process listens there."""

    def __init__(self, problem: str, *, gone: bool) -> None:
        super().__init__(f"{problem}; {REMEDY}")
        self.problem = problem
        self.gone = gone


class Reachability:
    """Probes nodes, with ``credentials``."""

    def __init__(self, nodes: NodeTable, credentials: Credentials) -> None:
        self._nodes = nodes
        self._credentials = credentials
        self._slots = asyncio.Semaphore(MAX_RPCS)
        self._probes: dict[Node, asyncio.Task[None]] = {}

    async def meet(self, node_id: str, epoch: int, role: pb.Role, address: str) -> None:
        """Probe a node at an address. Raises ``UnreachedError``, and ``PeerRefusedError`` if
        another node is there."""
        async with self._slots:
            status = await self._status(role, address)
        if (status.node_id, status.epoch) == (node_id, epoch):
            return
        other = f"node {status.node_id}" if status.node_id != node_id else "another start of it"
        raise PeerRefusedError(
            f"node {node_id} announces {address}, where the router meets {other}: give each node "
            f"an address of its own (--host, --port or --advertise)"
        )

    def doubt(self, node: Node) -> None:
        """Probe a node that a request did not reach. It is unreachable until it replies."""
        if node not in self._probes:
            task = self._probes[node] = asyncio.create_task(self._probe(node))
            task.add_done_callback(lambda _: self._probes.pop(node))

    async def close(self) -> None:
        tasks = list(self._probes.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self, node: Node) -> None:
        backoff = Backoff(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        while not node.lost:
            try:
                await self.meet(node.node_id, node.epoch, node.role, node.address)
            except (UnreachedError, PeerRefusedError) as error:
                if not node.lost:
                    # It was reached before, so its address is right.
                    problem = error.problem if isinstance(error, UnreachedError) else str(error)
                    self._nodes.set_unreachable(node, problem)
                await asyncio.sleep(backoff.pause())
            else:
                self._nodes.set_unreachable(node, "")
                return

    async def _status(self, role: pb.Role, address: str) -> pb.StatusReply:
        stub_class: Callable[[Any], Any] = PrefillStub if role == pb.ROLE_PREFILL else DecodeStub
        request = pb.StatusRequest(without_metrics=True)
        async with self._credentials.channel(address, CHANNEL_OPTIONS) as channel:
            stub = self._credentials.stub(stub_class, channel)
            try:
                reply: pb.StatusReply = await stub.Status(request, timeout=RPC_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise UnreachedError(
                    f"the router cannot reach this node at {address}: {self._reason(error)}",
                    gone=error.code() is grpc.StatusCode.UNAVAILABLE,
                ) from None
        return reply

    def _reason(self, error: grpc.aio.AioRpcError) -> str:
        match error.code():
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer within {RPC_SECONDS:g} s"
            case grpc.StatusCode.UNIMPLEMENTED:
                return "the server there is not a node of this role"
            case _:
                return self._credentials.explain(error)
