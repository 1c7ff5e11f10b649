"""The ASGI application: access checks, routes, and errors in the shape of their surface."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..shared.telemetry.logs import add_log_context, logger
from ..shared.telemetry.tracing import NO_TRACER, Tracer
from ..shared.version import version
from .cluster.node_table import NodeTable
from .cluster.registry_service import Registry
from .errors import ApiError, DrainingError, internal_error, to_api_error
from .handler import GenerateHandler
from .http.api_keys import ApiKeys
from .http.exchange import ClientGoneError, HttpExchange
from .http.hosts import AllowedHosts
from .metrics import CONTENT_TYPE, Metrics
from .openai.surfaces import ChatCompletions, Completions
from .options import RouterOptions
from .surface import Surface

log = logger("router")

PAGE = Path(__file__).parent / "web" / "chat.html"
PROBES = ("/live", "/health", "/ready")
METRICS = "/metrics"
SURFACES: tuple[Surface, ...] = (ChatCompletions(), Completions())

Handler = Callable[[HttpExchange], Any]


class App:
    """``draining`` turns /ready off."""

    def __init__(
        self,
        options: RouterOptions,
        nodes: NodeTable,
        registry: Registry,
        metrics: Metrics,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._options = options
        self._registry = registry
        self._metrics = metrics
        self._keys = ApiKeys(options)
        self._hosts = AllowedHosts(options)
        self.handler = GenerateHandler(options, nodes, registry, metrics, tracer)
        self.draining = False
        self._surfaces = {surface.path: surface for surface in SURFACES}
        self._routes: dict[str, tuple[str, Handler]] = {
            "/": ("GET", self._page),
            "/live": ("GET", self._live),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/version": ("GET", self._version),
            METRICS: ("GET", self._show_metrics),
            "/v1/models": ("GET", self._models),
            "/v1/models/*": ("GET", self._one_model),
        }
        for surface in SURFACES:
            handler = partial(self.handler.handle, surface=surface)
            self._routes[surface.path] = ("POST", handler)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = HttpExchange(scope, receive, send, self._options)
        # A client that keeps its connection would return to a router that is about to end.
        exchange.closes = self.draining
        add_log_context(request_id=exchange.request_id)
        try:
            handler = self._route(exchange)
            await handler(exchange)
        except ClientGoneError:
            exchange.access.gone = True
        except Exception as error:
            await self._fail(exchange, error)
        finally:
            exchange.close()
            if self._options.access_log:
                exchange.access.log()

    def close(self) -> None:
        self.handler.close()

    def _route(self, exchange: HttpExchange) -> Handler:
        path = exchange.path
        if path not in PROBES:
            self._hosts.check(exchange.header(b"host"))
            if path != METRICS:
                self._check_key(exchange)
        route = "/v1/models/*" if path.startswith("/v1/models/") else path
        if route not in self._routes:
            message = f"Invalid URL ({exchange.method} {path[:200]})"
            raise ApiError(404, message, code="unknown_url")
        method, handler = self._routes[route]
        if exchange.method != method and (exchange.method, method) != ("HEAD", "GET"):
            message = f"Not allowed to {exchange.method} on {path[:200]}; use {method}."
            allow = ((b"allow", method.encode()),)
            raise ApiError(405, message, code="method_not_supported", headers=allow)
        return handler

    def _check_key(self, exchange: HttpExchange) -> None:
        """Accept a key as Bearer, or as the password of Basic, which browsers can ask for."""
        if not self._keys.required:
            return
        scheme, _, given = exchange.header(b"authorization").partition(b" ")
        if scheme.lower() == b"basic":
            given = _basic_password(given)
        elif scheme.lower() != b"bearer":
            given = b""
        if not self._keys.known(given):
            challenge = b"Basic" if exchange.path == "/" else b"Bearer"
            message = "Incorrect API key provided." if given else "You did not provide an API key."
            headers = ((b"www-authenticate", challenge + b' realm="tandem"'),)
            raise ApiError(401, message, code="invalid_api_key", headers=headers)

    async def _fail(self, exchange: HttpExchange, error: Exception) -> None:
        """Answer with an error, or end the stream with it."""
        failure = to_api_error(error, retry_after=self._options.retry_after)
        if failure is None:
            log.error("%s %s failed", exchange.method, exchange.path, exc_info=error)
            failure = internal_error()
        exchange.access.error = failure.code or failure.kind
        if exchange.path not in PROBES:  # a poll that comes too early is no failed request
            self._metrics.errors.labels(str(failure.status)).inc()
        # Routes of no surface answer in the shape of the first.
        surface = self._surfaces.get(exchange.path, SURFACES[0])
        try:
            if exchange.streaming:
                await exchange.write(surface.error_event(failure))
                await exchange.end_stream()
            elif not exchange.started:
                body = surface.error_body(failure)
                await exchange.respond_json(failure.status, body, failure.headers)
        except ClientGoneError:
            exchange.access.gone = True

    # -- plain routes ------------------------------------------------------------------------

    async def _page(self, exchange: HttpExchange) -> None:
        policy = (
            b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
            b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = [(b"content-security-policy", policy), (b"x-content-type-options", b"nosniff")]
        await exchange.respond(200, PAGE.read_bytes(), b"text/html; charset=utf-8", headers)

    async def _live(self, exchange: HttpExchange) -> None:
        await exchange.respond_json(200, {"status": "ok"})

    async def _health(self, exchange: HttpExchange) -> None:
        """503 until the router can serve for the first time, because scripts wait for it."""
        self._registry.check_started()
        await exchange.respond_json(200, {"status": "ok"})

    async def _ready(self, exchange: HttpExchange) -> None:
        if self.draining:
            raise DrainingError("The router is stopping.", code="server_draining")
        self._registry.model()
        await exchange.respond_json(200, {"status": "ready"})

    async def _version(self, exchange: HttpExchange) -> None:
        await exchange.respond_json(200, {"version": version()})

    async def _show_metrics(self, exchange: HttpExchange) -> None:
        """404 where a key protects the port: Prometheus has no client's key, and without one
        metrics must not be readable."""
        if self._options.metrics_port is not None or self._options.asks_for_keys:
            message = "Metrics are not on this port; see --metrics-port of the router."
            raise ApiError(404, message, code="unknown_url")
        await exchange.respond(200, await self._metrics.page(), CONTENT_TYPE)

    async def _models(self, exchange: HttpExchange) -> None:
        card = self._registry.model().card()
        await exchange.respond_json(200, {"object": "list", "data": [card]})

    async def _one_model(self, exchange: HttpExchange) -> None:
        model = self._registry.model()
        model.check_name(exchange.path.removeprefix("/v1/models/") or "?")
        await exchange.respond_json(200, model.card())


def _basic_password(encoded: bytes) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except ValueError:
        return b""
