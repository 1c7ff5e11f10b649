"""Prefill nodes that do not join by themselves: the router polls them.

Each status reply of a node of ``--pd-url`` counts as a heartbeat. Such a node appears once it and a
decode node have started, and expires like any other when it stops.
"""

from __future__ import annotations

import asyncio

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.tandem_pb2_grpc import PrefillStub
from ...shared.errors import PeerRefusedError, RequestError
from ...shared.security.credentials import Credentials
from ...shared.telemetry.logs import logger
from ..node_streams.connection import CHANNEL_OPTIONS
from .node_table import NodeTable
from .registry_service import Registry

log = logger("router")

POLL_SECONDS = 1.0
RPC_SECONDS = 2.0


class StaticNodes:
    """Keeps the nodes at fixed addresses in the table for as long as they reply."""

    def __init__(
        self,
        nodes: NodeTable,
        registry: Registry,
        addresses: tuple[str, ...],
        credentials: Credentials,
    ) -> None:
        self._nodes = nodes
        self._registry = registry
        self._addresses = addresses
        self._credentials = credentials

    async def run(self) -> None:
        """Poll all addresses until cancelled."""
        if not self._addresses:
            await asyncio.Event().wait()
        await asyncio.gather(*(self._follow(address) for address in self._addresses))

    async def _follow(self, address: str) -> None:
        """Poll one address. A problem is logged once until it changes."""
        logged = ""
        version = 0
        while True:
            generation = self._credentials.generation
            async with self._credentials.channel(address, CHANNEL_OPTIONS) as channel:
                stub = self._credentials.stub(PrefillStub, channel)
                while generation == self._credentials.generation:
                    try:
                        request = pb.StatusRequest(prefix_version=version, without_metrics=True)
                        status = await stub.Status(request, timeout=RPC_SECONDS)
                        version = await self._enter(address, status)
                        problem = ""
                    except grpc.aio.AioRpcError as error:
                        problem = f"does not answer: {self._credentials.explain(error)}"
                    except (PeerRefusedError, RequestError):
                        problem = ""  # the registry has logged it
                    except Exception as error:  # a bad reply of one node must not stop the router
                        if (problem := f"sent a reply that failed here: {error!r}") != logged:
                            log.exception("the status of prefill node %s", address)
                    if problem and problem != logged:
                        log.warning("prefill node %s %s", address, problem)
                    logged = problem
                    await asyncio.sleep(POLL_SECONDS)

    async def _enter(self, address: str, status: pb.StatusReply) -> int:
        """Treat a status reply as a heartbeat, or as the join of a new node. Returns the version of
        the node's prefixes that the router has."""
        beat = pb.HeartbeatRequest(
            node_id=status.node_id,
            epoch=status.epoch,
            load=status.load,
            draining=status.draining or not status.ready,
            prefixes=status.prefixes,
        )
        # A new node is compared with the decode nodes' model.
        if self._nodes.heartbeat(beat) is None and self._nodes.decode_ready():
            join = pb.JoinRequest(
                node_id=status.node_id,
                epoch=status.epoch,
                role=status.role,
                address=address,
                model=status.model,
                load=status.load,
                version=status.version,
                capabilities=status.capabilities,
                prefixes=status.prefixes,
            )
            await self._registry.enter(join, address, met=True)
        return self._nodes.prefix_version(status.node_id, status.epoch)
