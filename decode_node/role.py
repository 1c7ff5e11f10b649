"""The decode role: generation, with prefill on other nodes where that is faster."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import grpc

from ..proto import tandem_pb2 as pb
from ..proto.tandem_pb2_grpc import add_DecodeServicer_to_server
from ..shared.node.role import NodeProcess
from .canary import Canary
from .examine import Examiner
from .peering.peers import Peers
from .receiving import ReceivingNode
from .service import DecodeService
from .transfers import Transfers


class DecodeRole:
    """See ``NodeRole``."""

    role = pb.ROLE_DECODE
    listens = False

    def __init__(self) -> None:
        self._service: DecodeService
        self._peers: Peers

    def register(self, server: grpc.aio.Server, process: NodeProcess) -> None:
        node = ReceivingNode(process.engine, process.identity, process.inbox, process.handoff)
        canary = Canary(node)
        self._peers = Peers(
            process.engine,
            process.identity,
            canary.check,
            process.metrics,
            process.credentials,
            max_peers=process.handoff.max_peers,
        )
        process.inbox.on_lost = self._peers.lost
        process.metrics.link_rates = self._peers.link_rates
        transfers = Transfers(node, self._peers, process.metrics)

        def status() -> pb.StatusReply:
            reply = process.status()
            reply.metrics.extend(process.metrics.samples())
            reply.refused.extend(self._peers.refused)
            return reply

        examiner = Examiner(node, self._peers, canary)
        self._service = DecodeService(
            process.engine,
            process.identity,
            transfers,
            examiner,
            status,
            process.tracer,
            process.credentials,
        )
        add_DecodeServicer_to_server(self._service, server)

    def background(self) -> list[Coroutine[Any, Any, None]]:
        return [self._peers.keep_leases(), self._peers.reconcile()]

    def admit(self) -> None:
        self._service.admit()

    def drain(self) -> None:
        self._service.drain()

    @property
    def busy(self) -> bool:
        return self._service.busy

    def cut_off(self) -> None:
        self._service.cut_off()

    async def close(self) -> None:
        await self._peers.close()
