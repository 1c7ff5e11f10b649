"""What routes use: the parts of a router, and the exchange of the request, as dependencies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from ...proto import tandem_pb2 as pb
from ..access.access import Access
from ..access.key_usage import KeyCounts, KeyUsage
from ..batches.batch_runner import Batches
from ..cluster.node_commands import NodeCommands
from ..cluster.node_table import NodeTable
from ..cluster.registry_service import Registry
from ..handler import GenerateHandler
from ..http.exchange import HttpExchange
from ..mcp.approvals import Approvals
from ..mcp.mcp_chat import McpChat
from ..options import RouterOptions
from ..responses.background_runs import BackgroundRuns
from ..responses.response_store import ResponseStore
from ..telemetry.metrics import Metrics
from ..web.overview import Overview, WorkerShare


class Siblings:
    """The other workers of a router: none, in a router of one process. ``whole`` is true if all
    workers serve. A worker has a subclass that asks its keeper."""

    whole: bool = True

    def __init__(
        self,
        commands: NodeCommands,
        metrics: Metrics,
        usage: Callable[[], dict[str, KeyCounts]],
        share: Callable[[], WorkerShare],
    ) -> None:
        self._commands = commands
        self._metrics = metrics
        self._usage = usage
        self._share = share

    async def drain(self, node_id: str, seconds: float | None) -> None:
        """Drain a node. Raises ``RequestError``."""
        self._commands.drain(node_id, seconds)

    async def set_role(self, node_id: str, role: pb.Role, *, force: bool) -> None:
        """Change the role of a node. Raises ``RequestError``."""
        self._commands.set_role(node_id, role, force=force)

    async def usage(self) -> dict[str, KeyCounts]:
        """The counts of every key, at all workers."""
        return self._usage()

    async def shares(self) -> list[WorkerShare]:
        """The shares of all workers in the overview of the cluster."""
        return [self._share()]

    async def page(self) -> bytes:
        """The metrics of all workers."""
        return await self._metrics.page()


@dataclass(kw_only=True)
class Services:
    """The parts of one router. ``batches`` is ``None`` where files and batches are off, for the
    reason ``batches_off``; ``draining`` turns /ready off; ``shut_down`` does what SIGTERM does."""

    options: RouterOptions
    access: Access
    nodes: NodeTable
    registry: Registry
    metrics: Metrics
    handler: GenerateHandler
    usage: KeyUsage
    responses: ResponseStore
    runs: BackgroundRuns
    approvals: Approvals
    chat: McpChat
    overview: Overview
    siblings: Siblings
    batches: Batches | None = None
    batches_off: str = ""
    draining: bool = False
    shut_down: Callable[[], None] = lambda: None


async def _services(request: Request) -> Services:
    services: Services = request.state.services
    return services


async def _exchange(request: Request) -> HttpExchange:
    exchange: HttpExchange = request.state.exchange
    return exchange


RouterServices = Annotated[Services, Depends(_services)]
Exchange = Annotated[HttpExchange, Depends(_exchange)]
