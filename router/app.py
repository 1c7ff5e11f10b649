"""The HTTP surface: routes, access, and from a parsed request to an answer."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ..shared.errors import OverloadedError
from ..shared.telemetry.logs import add_log_context, logger
from ..shared.telemetry.tracing import NO_TRACER, Tracer, Value, serving
from ..shared.version import version
from .cluster.node_table import NodeTable
from .cluster.registry import Registry
from .errors import ApiError, DrainingError, internal_error, to_api_error
from .generation import Delta, Generation, Item
from .http.api_keys import ApiKeys
from .http.encoding import encode
from .http.exchange import JSON_TYPE, ClientGoneError, Exchange
from .http.held_bytes import Budget, Share
from .http.hosts import AllowedHosts
from .http.json_body import parse_json
from .http.parsing import Parsers
from .http.slices import Slices
from .metrics import CONTENT_TYPE, Metrics, RequestMetrics
from .openai.answer import Folding
from .openai.chat_answer import ChatAnswer
from .openai.chat_request import parse_chat
from .openai.completion_answer import CompletionAnswer
from .openai.completion_request import parse_completion
from .options import RouterOptions
from .serve import serve
from .served_model import ServedModel

log = logger("router")

PAGE = Path(__file__).parent / "web" / "chat.html"
PROBES = ("/live", "/health", "/ready")
METRICS = "/metrics"
# Names of unknown fields that are logged, once each; clients may make up any number of them.
MAX_NAMED_FIELDS = 64

Parse = Callable[[Any, ServedModel, RouterOptions], Generation]
Items = AsyncGenerator[Item, None]
Words = type[ChatAnswer] | type[CompletionAnswer]


class App:
    """An ASGI application. ``draining`` turns /ready off; ``abort`` ends what still runs."""

    def __init__(
        self,
        options: RouterOptions,
        nodes: NodeTable,
        registry: Registry,
        metrics: Metrics,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._options = options
        self._nodes = nodes
        self._registry = registry
        self._metrics = metrics
        self._tracer = tracer
        self._keys = ApiKeys(options)
        self._hosts = AllowedHosts(options)
        self._parsers = Parsers(options.parse_timeout)
        self._work: set[asyncio.Task[None]] = set()
        held = max(options.max_held_body_bytes, options.max_body_bytes)
        self._bodies = Budget(held, "bytes of bodies")
        self._prompts = Budget(options.max_held_prompt_tokens, "prompt tokens")
        self._answers = Budget(options.max_held_answer_bytes, "bytes of answers")
        self._active = 0
        self._named_fields: set[str] = set()
        self.draining = False
        self._routes: dict[str, tuple[str, Callable[[Exchange], Any]]] = {
            "/": ("GET", self._page),
            "/live": ("GET", self._live),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/version": ("GET", self._version),
            METRICS: ("GET", self._show_metrics),
            "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
        }
        self._one_model_route: tuple[str, Callable[[Exchange], Any]] = ("GET", self._one_model)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send, self._options)
        # A client that keeps its connection would come back to a router that is about to end.
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

    @property
    def active(self) -> int:
        """Requests that have begun and not ended."""
        return self._active

    def abort(self) -> None:
        """The drain is over: every request that still runs gets its error now."""
        for task in tuple(self._work):
            task.cancel()

    def close(self) -> None:
        self._parsers.close()

    def _route(self, exchange: Exchange) -> Callable[[Exchange], Any]:
        path = exchange.path
        if path not in PROBES:
            self._hosts.check(exchange.header(b"host"))
            if path != METRICS:
                self._check_key(exchange)
        if path.startswith("/v1/models/"):
            method, handler = self._one_model_route
        elif path in self._routes:
            method, handler = self._routes[path]
        else:
            message = f"Invalid URL ({exchange.method} {path[:200]})"
            raise ApiError(404, message, code="unknown_url")
        if exchange.method != method and (exchange.method, method) != ("HEAD", "GET"):
            message = f"Not allowed to {exchange.method} on {path[:200]}; use {method}."
            allow = ((b"allow", method.encode()),)
            raise ApiError(405, message, code="method_not_supported", headers=allow)
        return handler

    def _check_key(self, exchange: Exchange) -> None:
        """Bearer for programs; Basic, with the key as password, so that browsers can ask for it."""
        if not self._keys.asked:
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

    async def _fail(self, exchange: Exchange, error: Exception) -> None:
        told = to_api_error(error, retry_after=self._options.retry_after)
        if told is None:
            log.error("%s %s failed", exchange.method, exchange.path, exc_info=error)
            told = internal_error()
        exchange.access.error = told.code or told.kind
        if exchange.path not in PROBES:  # a poll that asks too early is no failed request
            self._metrics.errors.labels(str(told.status)).inc()
        try:
            if exchange.streaming:
                await exchange.events([told.body()])
                await exchange.end_events(done=False)
            elif not exchange.started:
                await exchange.json(told.status, told.body(), told.headers)
        except ClientGoneError:
            exchange.access.gone = True

    # -- plain routes ------------------------------------------------------------------------

    async def _page(self, exchange: Exchange) -> None:
        policy = (
            b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
            b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = [(b"content-security-policy", policy), (b"x-content-type-options", b"nosniff")]
        await exchange.answer(200, PAGE.read_bytes(), b"text/html; charset=utf-8", headers)

    async def _live(self, exchange: Exchange) -> None:
        await exchange.json(200, {"status": "ok"})

    async def _health(self, exchange: Exchange) -> None:
        """503 until the router can serve for the first time, since scripts wait for this route."""
        self._registry.check_started()
        await exchange.json(200, {"status": "ok"})

    async def _ready(self, exchange: Exchange) -> None:
        if self.draining:
            raise DrainingError("The router is stopping.", code="server_draining")
        self._registry.model()
        await exchange.json(200, {"status": "ready"})

    async def _version(self, exchange: Exchange) -> None:
        await exchange.json(200, {"version": version()})

    async def _show_metrics(self, exchange: Exchange) -> None:
        """Prometheus has no client's key, and whoever has none must not read it through the port
        that a key protects."""
        if self._options.metrics_port is not None or self._options.asks_for_keys:
            message = "Metrics are not on this port; see --metrics-port of the router."
            raise ApiError(404, message, code="unknown_url")
        await exchange.answer(200, await self._metrics.page(), CONTENT_TYPE)

    async def _models(self, exchange: Exchange) -> None:
        card = self._registry.model().card()
        await exchange.json(200, {"object": "list", "data": [card]})

    async def _one_model(self, exchange: Exchange) -> None:
        model = self._registry.model()
        model.check_name(exchange.path.removeprefix("/v1/models/") or "?")
        await exchange.json(200, model.card())

    # -- generation --------------------------------------------------------------------------

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, parse_chat, ChatAnswer)

    async def _completions(self, exchange: Exchange) -> None:
        await self._generate(exchange, parse_completion, CompletionAnswer)

    async def _generate(self, exchange: Exchange, parse: Parse, words: Words) -> None:
        if self._active >= self._options.max_concurrent_requests:
            raise OverloadedError(
                f"The server has {self._active} requests in progress, which is its limit; try "
                "again later."
            )
        self._active += 1
        traceparent = exchange.header(b"traceparent").decode("latin-1")
        about = {"request_id": exchange.request_id, "route": exchange.path}
        try:
            with serving(self._tracer, "request", traceparent, **about) as span:
                with self._bodies.share() as share:
                    generation = await self._parse(exchange, await exchange.body(share), parse)
                self._name_ignored(generation)
                span.set(**_described(generation))
                answer = words(generation, int(time.time()))
                with self._prompts.share() as prompts, self._answers.share() as answers:
                    prompts.take(sum(len(prompt.tokens) for prompt in generation.prompts))
                    work = self._answer(exchange, generation, answer, answers)
                    await self._unless_gone(exchange, work)
        finally:
            self._active -= 1

    def _name_ignored(self, generation: Generation) -> None:
        """A field that nobody knows may be a misspelled one: say so, once."""
        for name in sorted(generation.ignored - self._named_fields):
            if len(self._named_fields) < MAX_NAMED_FIELDS:
                self._named_fields.add(name)
                log.warning("requests have the field %r, which is unknown and ignored", name)

    async def _parse(self, exchange: Exchange, body: bytes, parse: Parse) -> Generation:
        model = self._registry.model()

        def run() -> Generation:
            return parse(parse_json(body, model.max_model_len), model, self._options)

        return await self._parsers.run(exchange.client, len(body), run)

    async def _unless_gone(self, exchange: Exchange, answer: Any) -> None:
        """Run ``answer``, and cancel it when the client goes away."""
        work = asyncio.create_task(answer)
        gone = asyncio.create_task(exchange.disconnected())
        self._work.add(work)
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGoneError
            if work.cancelled():
                message = "The server is stopping; send the request again."
                raise DrainingError(message, code="server_draining")
            work.result()
        finally:
            self._work.discard(work)
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(
        self,
        exchange: Exchange,
        generation: Generation,
        words: ChatAnswer | CompletionAnswer,
        share: Share,
    ) -> None:
        access = exchange.access
        with RequestMetrics(self._metrics, generation, access) as timed:
            run = serve(generation, self._nodes, self._options, access.usage)
            async with aclosing(run) as items:
                if generation.stream:
                    await _stream(exchange, items, timed, generation, words)
                else:
                    folding = Folding(generation, words.logprobs, share)
                    await _collect(items, timed, folding)
                    timed.finish(access.usage)
                    body = await encode(words.whole(folding.answer(access.usage)))
                    await exchange.answer_in_pieces(200, body, JSON_TYPE)


async def _stream(
    exchange: Exchange,
    items: Items,
    timed: RequestMetrics,
    generation: Generation,
    words: ChatAnswer | CompletionAnswer,
) -> None:
    """Write the items as they arrive. The head goes out with the first, when a node has admitted
    the request: an error until then still has its status."""
    slices = Slices()
    async for item in items:
        if not exchange.started:
            await exchange.start_events()
            await exchange.events(words.opening())
        timed.count(item)
        if isinstance(item, Delta):
            await exchange.events(words.chunks(item))
        await slices.rest()
    usage = exchange.access.usage
    timed.finish(usage)
    if generation.include_usage:
        await exchange.events([words.usage(usage)])
    await exchange.end_events(done=True)


async def _collect(items: Items, timed: RequestMetrics, folding: Folding) -> None:
    """Fold the items into a whole answer. Many that arrive at once do not hold the event loop."""
    slices = Slices()
    async for item in items:
        timed.count(item)
        folding.add(item)
        await slices.rest()


def _described(generation: Generation) -> dict[str, Value]:
    """What the request's span says of it; none of its words."""
    return {
        "answer_id": generation.request_id,
        "model": generation.model.name,
        "prompts": len(generation.prompts),
        "prompt_tokens": sum(len(prompt.tokens) for prompt in generation.prompts),
        "choices": generation.choices,
        "stream": generation.stream,
    }


def _basic_password(encoded: bytes) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except ValueError:
        return b""
