"""The prefill role: an engine that stops before sampling."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import grpc

from ..proto import tandem_pb2 as pb
from ..proto.tandem_pb2_grpc import add_PrefillServicer_to_server
from ..shared.node.role import NodeProcess
from .service import PrefillService


class PrefillRole:
    """See ``NodeRole``."""

    role = pb.ROLE_PREFILL
    listens = True

    def __init__(self) -> None:
        self._service: PrefillService

    def register(self, server: grpc.aio.Server, process: NodeProcess) -> None:
        self._service = PrefillService(
            process.engine,
            process.identity,
            process.inbox,
            process.metrics,
            process.status,
            process.handoff,
            process.tracer,
        )
        add_PrefillServicer_to_server(self._service, server)

    def background(self) -> list[Coroutine[Any, Any, None]]:
        return [self._service.expire_leases()]

    def admit(self) -> None:
        self._service.draining = False

    def drain(self) -> None:
        self._service.draining = True

    @property
    def busy(self) -> bool:
        return self._service.live > 0

    def cut_off(self) -> None:
        """No-op: decode nodes continue without this node when their RPCs end."""

    async def close(self) -> None:
        """No-op: transfers end with their RPCs."""
