"""Dependencies of routes: the parts of the router, and the HTTP exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from ..access.guard import Access
from ..access.key_usage import KeyUsage
from ..batches.runner import Batches
from ..cluster.node_table import NodeTable
from ..cluster.registry_service import Registry
from ..handler import GenerateHandler
from ..http.exchange import HttpExchange
from ..mcp.approvals import Approvals
from ..mcp.chat import McpChat
from ..options import RouterOptions
from ..responses.background_runs import BackgroundRuns
from ..responses.store import ResponseStore
from ..telemetry.metrics import Metrics
from ..web.overview import Overview


@dataclass(kw_only=True)
class Services:
    """The parts of one router. ``batches`` is ``None`` if files and batches are off, for the reason
    ``batches_off``. While ``draining``, /ready fails. ``shut_down`` acts like SIGTERM."""

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
