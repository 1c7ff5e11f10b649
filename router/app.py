"""The ASGI application: FastAPI's routes, and errors in the shape of their API."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from ..shared.errors import StartupError
from ..shared.telemetry.logs import add_log_context, logger
from ..shared.telemetry.tracing import NO_TRACER, Tracer
from ..shared.version import version
from . import state
from .access.cross_origin import with_cross_origin
from .access.guard import Access
from .access.key_usage import KeyUsage
from .access.rate_limits import RateLimits
from .anthropic.errors import AnthropicErrors
from .anthropic.models import VERSION_HEADER
from .batches.background import BackgroundResponses
from .batches.runner import Batches, batch_folder
from .cluster.node_table import NodeTable
from .cluster.registry_service import Registry
from .database import Database
from .errors import ApiError, failure_of
from .handler import GenerateHandler
from .http.access_log import PROBES
from .http.exchange import ClientGoneError, HttpExchange
from .mcp.approvals import Approvals
from .mcp.chat import McpChat
from .mcp.servers import mcp_servers
from .ollama.formatter import OllamaErrors
from .openai.errors import OpenAIErrors
from .options import RouterOptions
from .responses.background_runs import BackgroundRuns
from .responses.store import ResponseStore
from .responses.surface import ResponseErrors
from .routes import (
    anthropic,
    ollama,
    openai,
    openai_batches,
    openai_embeddings,
    openai_files,
    openai_responses,
    operations,
    operator_commands,
    page,
    sagemaker,
    scores,
    tokenization,
)
from .routes.documentation import components
from .routes.operations import METRICS
from .routes.services import Services
from .surface import ErrorShape
from .telemetry.metrics import Metrics
from .web.overview import Overview

log = logger("router")

# More than any route needs. Parsing a query as large as a request head may be takes 30 ms.
MAX_QUERY_BYTES = 8 * 1024
NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "operation_spans": False}


@dataclass(frozen=True, eq=False)
class Api:
    """The routes of one API, the shape of its errors, and the models that document both.
    ``id_header`` is the API's own name for the header ``x-request-id``, ``stream_type`` the content
    type of its streams unless they are server-sent events. With ``any_type`` a body need not
    declare the content type JSON."""

    router: APIRouter
    errors: ErrorShape
    models: tuple[type[BaseModel], ...] = ()
    id_header: bytes | None = None
    stream_type: bytes | None = None
    any_type: bool = False


OPENAI_ERRORS = OpenAIErrors()
ANTHROPIC_ERRORS = AnthropicErrors()
APIS = (
    Api(openai.router, OPENAI_ERRORS, openai.MODELS),
    Api(openai_embeddings.router, OPENAI_ERRORS, openai_embeddings.MODELS),
    Api(scores.router, OPENAI_ERRORS, scores.MODELS),
    Api(openai_responses.router, ResponseErrors(), openai_responses.MODELS),
    Api(openai_files.router, OPENAI_ERRORS),
    Api(openai_batches.router, OPENAI_ERRORS, openai_batches.MODELS),
    # Any content type, like Ollama: curl sends another one by default.
    Api(ollama.router, OllamaErrors(), ollama.MODELS, stream_type=ollama.LINES, any_type=True),
    Api(anthropic.router, ANTHROPIC_ERRORS, anthropic.MODELS, id_header=b"request-id"),
    Api(tokenization.router, OPENAI_ERRORS, tokenization.MODELS),
    Api(sagemaker.router, OPENAI_ERRORS),
    Api(operations.router, OPENAI_ERRORS),
    Api(page.router, OPENAI_ERRORS),
    Api(operator_commands.router, OPENAI_ERRORS, operator_commands.MODELS),
)


class _Routes(FastAPI):
    """FastAPI without its own error handling; ``App`` handles errors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._documenting = Lock()

    def build_middleware_stack(self) -> ASGIApp:
        return AsyncExitStackMiddleware(self.router)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, built once; several threads may request it at the same time."""
        with self._documenting:
            if self.openapi_schema is None:
                document = super().openapi()
                schemas = components(model for api in APIS for model in api.models)
                document["components"]["schemas"] |= schemas
            return super().openapi()


class App:
    """The ASGI entry point of all routes: one ``HttpExchange`` for each request."""

    def __init__(
        self,
        options: RouterOptions,
        nodes: NodeTable,
        registry: Registry,
        metrics: Metrics,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._options = options
        self._batch_folder = batch_folder(options)
        self._state = Database(state.SCHEMA)
        self.mcp = mcp_servers(options)
        self._usage = KeyUsage()
        self._access = Access(options)
        metrics.add(self._usage)
        self._limits = RateLimits(options, self._usage)
        self.handler = GenerateHandler(options, nodes, registry, metrics, tracer, self._limits)
        responses = ResponseStore(
            self._state, options.max_stored_responses, options.response_lifetime
        )
        overview = Overview(
            nodes,
            options.heartbeat_period,
            metrics.work,
            lambda: self.handler.active,
        )
        self.services = Services(
            options=options,
            access=self._access,
            nodes=nodes,
            registry=registry,
            metrics=metrics,
            handler=self.handler,
            usage=self._usage,
            responses=responses,
            runs=BackgroundRuns(responses, self.handler, self._usage, options),
            approvals=Approvals(self._state, options.response_lifetime),
            chat=McpChat(self.mcp, self.handler.parsers, self.handler.prompts),
            overview=overview,
            batches=self._batches(),
            batches_off=self._batch_folder.why_off,
        )
        self._door = with_cross_origin(self._serve, options)
        self._routes = _routes(APIS)
        self._apis = {
            route.path: api
            for api in APIS
            for route in api.router.routes
            if isinstance(route, APIRoute)
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._door(scope, receive, send)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = HttpExchange(scope, receive, send, self._options)
        # A kept-alive connection would bring the next request to a router that is about to end.
        exchange.closes = self.services.draining
        add_log_context(request_id=exchange.request_id)
        if api := self._apis.get(exchange.path):
            exchange.id_header = api.id_header
            exchange.stream_type = api.stream_type or exchange.stream_type
            exchange.any_type = api.any_type
        scope["state"] |= {"exchange": exchange, "services": self.services}
        if exchange.method == "HEAD":
            scope = scope | {"method": "GET"}  # uvicorn omits the body
        try:
            _check_query(scope["query_string"])
            await self._routes(scope, receive, exchange.send)
        except ClientGoneError:
            exchange.access.client_gone = True
        except Exception as error:
            await self._fail(exchange, error)
        finally:
            exchange.close()
            self._usage.count(exchange.access)
            if self._options.access_log:
                exchange.access.log()

    async def close(self) -> None:
        self.handler.close()
        await self._limits.close()
        await self.services.approvals.close()
        await self._state.close()

    def _batches(self) -> Batches | None:
        options, folder = self._options, self._batch_folder.path
        if folder is None:
            return None
        responses = BackgroundResponses(
            self.handler,
            lambda endpoint, owner: openai_batches.surface_of(endpoint, owner, self.services),
            self._access.owner_named,
            self._usage,
            options,
        )
        return Batches(folder, options, responses)

    async def open(self) -> None:
        """Open the stores that outlive a router, in memory if they have no folder. Raises
        ``StartupError`` if a folder that an option names cannot be used."""
        services, folder = self.services, self._batch_folder
        if services.batches is not None and folder.path is not None:
            try:
                await services.batches.open()
                await self._state.open(folder.path / state.FILE)
            except StartupError as error:
                if folder.required:
                    raise
                await services.batches.close()
                services.batches, services.batches_off = None, f"{error}"
                log.warning(
                    "files and batches are off, and responses are stored in memory: %s", error
                )
            else:
                log.info("files, batches and stored responses are kept in %s", folder.path)
                return
        await self._state.open_in_memory()

    async def _fail(self, exchange: HttpExchange, error: Exception) -> None:
        """Respond with an error, or end the stream with an error event."""
        failure = self._failure(exchange, error)
        failure.request_id = exchange.request_id
        exchange.access.error = failure.code or failure.kind
        if exchange.path not in PROBES:  # "not ready yet" is no failed request
            self.services.metrics.count_error(failure.status)
        shape = self._error_shape(exchange)
        try:
            if exchange.streaming:
                await exchange.write(shape.error_event(failure))
                await exchange.end_stream()
            elif not exchange.started:
                body = shape.error_body(failure)
                await exchange.respond_json(failure.status, body, failure.headers)
        except ClientGoneError:
            exchange.access.client_gone = True

    def _error_shape(self, exchange: HttpExchange) -> ErrorShape:
        if exchange.path.startswith("/v1/models") and exchange.header(VERSION_HEADER):
            return ANTHROPIC_ERRORS
        api = self._apis.get(exchange.path)
        return OPENAI_ERRORS if api is None else api.errors

    def _failure(self, exchange: HttpExchange, error: Exception) -> ApiError:
        if isinstance(error, HTTPException):
            try:
                return self._no_route(exchange, error)
            except ApiError as denied:
                return denied
        what = f"{exchange.method} {exchange.path}"
        return failure_of(error, what, retry_after=self._options.retry_after)

    def _no_route(self, exchange: HttpExchange, error: HTTPException) -> ApiError:
        """The error for a request without a route. Access is checked here because no route's
        dependencies did it: clients without a key must not find out which paths exist."""
        method, path = exchange.method, exchange.path
        if path not in PROBES:
            self.services.access.check_host(exchange)
            if path != METRICS:
                self.services.access.check_key(exchange)
        if error.status_code == 405:
            allowed = _methods(path) or (error.headers or {})["Allow"]
            message = f"Not allowed to {method} on {path[:200]}; use {allowed}."
            allow = ((b"allow", allowed.encode()),)
            return ApiError(405, message, code="method_not_supported", headers=allow)
        return ApiError(404, f"Invalid URL ({method} {path[:200]})", code="unknown_url")


def _check_query(query: bytes) -> None:
    if len(query) > MAX_QUERY_BYTES:
        message = f"The query has {len(query)} bytes; the limit is {MAX_QUERY_BYTES}."
        raise ApiError(414, message, code="query_too_long")


def _methods(path: str) -> str:
    """The methods of a path, over all routes that match it."""
    methods = {
        method
        for api in APIS
        for route in api.router.routes
        if isinstance(route, APIRoute) and route.path_regex.match(path)
        for method in route.methods or ()
    }
    return ", ".join(sorted(methods))


@cache
def _routes(apis: tuple[Api, ...]) -> FastAPI:
    """The routes, shared by all routers of a process: a request's scope carries the services."""
    routes = _Routes(
        title="Tandem",
        version=version(),
        openapi_url=None,
        redirect_slashes=False,
        telemetry=NO_TELEMETRY,
    )
    for api in apis:
        routes.include_router(api.router)
    return routes
