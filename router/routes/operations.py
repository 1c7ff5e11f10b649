"""The documentation, probes, usage, version and metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel

from ...proto.roles import role_name
from ...shared.errors import UnavailableError
from ...shared.version import version
from ..access.key_usage import KeyCounts
from ..errors import ApiError, DrainingError
from ..openai.response_models import OpenAIError
from ..telemetry.metrics import CONTENT_TYPE
from ..web.documentation_page import documentation_page
from .documentation import documented_errors
from .guards import HOST_CHECKED, KEY_CHECKED
from .services import Exchange, RouterServices, Services

METRICS = "/metrics"
DOCUMENTATION_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
}

router = APIRouter(tags=["operations"], responses=documented_errors(OpenAIError))


class Status(BaseModel):
    status: str


class ServerLoad(BaseModel):
    server_load: int


class HealthDetails(BaseModel):
    """``nodes`` has the number of nodes by role and state, such as ``decode/ready``."""

    status: str
    version: str
    uptime_seconds: float
    model: str | None
    requests: int
    nodes: dict[str, int]


class LimitedRequests(BaseModel):
    requests: int
    tokens: int


class KeyUsageEntry(BaseModel):
    """The counts of one key; ``limited`` counts requests over the key's limits."""

    key: str
    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int
    limited: LimitedRequests


class UsageReport(BaseModel):
    """Counts since ``since``, the Unix time at which the router started."""

    object: str = "list"
    since: int
    data: list[KeyUsageEntry]


class Version(BaseModel):
    version: str


@router.get("/live")
@router.get("/health/live")
async def live() -> Status:
    """200 while the process runs."""
    return Status(status="ok")


@router.get("/health")
async def health(services: RouterServices) -> Status:
    """503 until the router can serve for the first time. Start scripts wait for it."""
    services.registry.check_started()
    return Status(status="ok")


@router.get("/ready")
@router.get("/health/ready")
async def ready(services: RouterServices) -> Status:
    """503 while the router cannot serve."""
    if services.draining:
        raise DrainingError("The router is stopping.", code="server_draining")
    services.registry.check_ready()
    return Status(status="ready")


@router.get("/health/details", dependencies=KEY_CHECKED)
async def health_details(services: RouterServices) -> HealthDetails:
    """The state of the router and its nodes; 200 in every state."""
    status, model = _status(services)
    nodes = Counter((role_name(node.role), node.state) for node in services.nodes)
    nodes.update(services.nodes.absent.tally())
    return HealthDetails(
        status=status,
        version=version(),
        uptime_seconds=round(time.time() - services.registry.started, 1),
        model=model,
        requests=services.handler.active,
        nodes={f"{role}/{state}": count for (role, state), count in sorted(nodes.items())},
    )


@router.get("/load", dependencies=KEY_CHECKED)
async def load(services: RouterServices) -> ServerLoad:
    """The number of requests in progress, as in vLLM."""
    return ServerLoad(server_load=services.handler.active)


@router.get("/v1/usage", response_model=UsageReport, dependencies=KEY_CHECKED)
async def show_usage(exchange: Exchange, services: RouterServices) -> Response:
    """Requests and tokens of the client's key; for an admin's key, of all keys."""
    own, counts = exchange.owner, services.usage.all()
    if not own.admin:
        counts = {own.name: counts.get(own.name, KeyCounts())}
    report = UsageReport(
        since=int(services.registry.started),
        data=[_entry(name, counts[name]) for name in sorted(counts)],
    )
    return Response(report.model_dump_json(), media_type="application/json")


@router.get("/version", dependencies=KEY_CHECKED)
async def show_version() -> Version:
    """The version of the router."""
    return Version(version=version())


@router.get("/openapi.json", include_in_schema=False, dependencies=KEY_CHECKED)
async def show_openapi(request: Request) -> Response:
    """The OpenAPI document of all routes, built in a thread on the first request."""
    document = await asyncio.to_thread(request.app.openapi)
    return JSONResponse(document)


@router.get("/docs", response_class=HTMLResponse, dependencies=KEY_CHECKED)
async def show_documentation(request: Request) -> Response:
    """The OpenAPI document as an HTML page."""
    page = await asyncio.to_thread(lambda: documentation_page(request.app.openapi()))
    return HTMLResponse(page, headers=DOCUMENTATION_HEADERS)


@router.get(METRICS, dependencies=HOST_CHECKED, response_class=PlainTextResponse)
async def metrics(services: RouterServices) -> Response:
    """Metrics in Prometheus' text format.

    404 if keys protect the port, since Prometheus has no key and metrics must not be public; and if
    several routers share the port, since each scrape would reach another one."""
    options = services.options
    if options.metrics_port is not None or options.requires_key or options.router_workers > 1:
        message = "Metrics are not on this port; see --metrics-port of the router."
        raise ApiError(404, message, code="unknown_url")
    page = await services.metrics.page()
    return Response(page, headers={"content-type": CONTENT_TYPE})


def _status(services: Services) -> tuple[str, str | None]:
    """The state of the router in a word, and the served model."""
    if services.draining:
        return "draining", None
    try:
        services.registry.check_ready()
        return "ready", services.registry.model().name
    except UnavailableError:
        return "unavailable", None


def _entry(name: str, counts: KeyCounts) -> KeyUsageEntry:
    return KeyUsageEntry(
        key=name,
        requests=counts.requests,
        errors=counts.errors,
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        completion_tokens=counts.completion_tokens,
        total_tokens=counts.prompt_tokens + counts.completion_tokens,
        limited=LimitedRequests(
            requests=counts.limited["requests"], tokens=counts.limited["tokens"]
        ),
    )
