"""Prefill nodes that do not join by themselves: the router asks them, and enters them in the table.

A node behind ``--pd-url`` is polled for its status; each answer counts as a heartbeat, so that it
appears when it starts and expires when it stops, like any other.
"""

from __future__ import annotations

import asyncio

import grpc

from ..proto import tandem_pb2 as pb
from ..proto.tandem_pb2_grpc import PrefillStub
from ..shared.telemetry import logger
from .nodes import NodeTable

log = logger("router")

POLL_SECONDS = 1.0
CALL_SECONDS = 2.0


class StaticNodes:
    """Keeps the nodes at fixed addresses in the table for as long as they answer."""

    def __init__(self, nodes: NodeTable, addresses: tuple[str, ...]) -> None:
        self._nodes = nodes
        self._addresses = addresses

    async def run(self) -> None:
        """Until cancelled."""
        if not self._addresses:
            await asyncio.Event().wait()
        await asyncio.gather(*(self._follow(address) for address in self._addresses))

    async def _follow(self, address: str) -> None:
        known = False
        async with grpc.aio.insecure_channel(address) as channel:
            stub = PrefillStub(channel)
            while True:
                try:
                    status = await stub.Status(pb.StatusRequest(), timeout=CALL_SECONDS)
                except grpc.aio.AioRpcError as error:
                    if known:
                        log.warning("prefill node %s does not answer: %s", address, error.details())
                    known = False
                else:
                    known = self._enter(address, status)
                await asyncio.sleep(POLL_SECONDS)

    def _enter(self, address: str, status: pb.StatusReply) -> bool:
        beat = pb.HeartbeatRequest(
            node_id=status.node_id,
            epoch=status.epoch,
            load=status.load,
            draining=status.draining or not status.ready,
            metrics=status.metrics,
        )
        if not self._nodes.heartbeat(beat):
            join = pb.JoinRequest(
                node_id=status.node_id,
                epoch=status.epoch,
                role=status.role,
                address=address,
                model=status.model,
                load=status.load,
            )
            self._nodes.join(join, address)
        return True
