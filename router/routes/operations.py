"""The chat page, probes, version and metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel

from ...shared.version import version
from ..errors import ApiError, DrainingError
from ..metrics import CONTENT_TYPE
from ..openai.answers import OpenAIError
from .documentation import documented_errors
from .guards import HOST_CHECKED, KEY_CHECKED
from .services import RouterServices

PROBES = ("/live", "/health", "/ready")
METRICS = "/metrics"
PAGE = Path(__file__).parent.parent / "web" / "chat.html"
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
}

router = APIRouter(tags=["operations"], responses=documented_errors(OpenAIError))


class Status(BaseModel):
    status: str


class Version(BaseModel):
    version: str


@router.get("/", response_class=HTMLResponse, dependencies=KEY_CHECKED)
async def chat_page() -> Response:
    """A page to chat with the model."""
    return HTMLResponse(PAGE.read_bytes(), headers=PAGE_HEADERS)


@router.get("/live")
async def live() -> Status:
    """200 while the process runs."""
    return Status(status="ok")


@router.get("/health")
async def health(services: RouterServices) -> Status:
    """503 until the router can serve for the first time, because scripts wait for it."""
    services.registry.check_started()
    return Status(status="ok")


@router.get("/ready")
async def ready(services: RouterServices) -> Status:
    """503 while the router cannot serve."""
    if services.draining:
        raise DrainingError("The router is stopping.", code="server_draining")
    services.registry.model()
    return Status(status="ready")


@router.get("/version", dependencies=KEY_CHECKED)
async def show_version() -> Version:
    """The version of the router."""
    return Version(version=version())


@router.get("/openapi.json", include_in_schema=False, dependencies=KEY_CHECKED)
async def show_openapi(request: Request) -> Response:
    """The document that describes all routes; the first request has a thread make it."""
    document = await asyncio.to_thread(request.app.openapi)
    return JSONResponse(document)


@router.get(METRICS, dependencies=HOST_CHECKED, response_class=PlainTextResponse)
async def metrics(services: RouterServices) -> Response:
    """Metrics in Prometheus' text format.

    404 where a key protects the port: Prometheus has no client's key, and without one metrics must
    not be readable."""
    if services.options.metrics_port is not None or services.options.asks_for_keys:
        message = "Metrics are not on this port; see --metrics-port of the router."
        raise ApiError(404, message, code="unknown_url")
    page = await services.metrics.page()
    return Response(page, headers={"content-type": CONTENT_TYPE})
