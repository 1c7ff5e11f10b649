"""What routes use: the parts of a router, and the exchange of the request, as dependencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from ..cluster.registry_service import Registry
from ..handler import GenerateHandler
from ..http.access import Access
from ..http.exchange import HttpExchange
from ..metrics import Metrics
from ..options import RouterOptions


@dataclass(kw_only=True)
class Services:
    """The parts of one router. ``draining`` turns /ready off."""

    options: RouterOptions
    access: Access
    registry: Registry
    metrics: Metrics
    handler: GenerateHandler
    draining: bool = False


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def _exchange(request: Request) -> HttpExchange:
    exchange: HttpExchange = request.state.exchange
    return exchange


RouterServices = Annotated[Services, Depends(_services)]
Exchange = Annotated[HttpExchange, Depends(_exchange)]
