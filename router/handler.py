"""Handle one HTTP request of a surface: parse the body, serve it, write the response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Set
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..shared.errors import OverloadedError
from ..shared.telemetry.logs import logger
from ..shared.telemetry.tracing import Tracer, Value, serving
from .access.rate_limits import LimitedRequest, RateLimits
from .cluster.node_table import NodeTable
from .cluster.registry_service import Registry
from .dispatch import Dispatcher
from .errors import DeadlineError, DrainingError, invalid
from .generation import GenerationRequest, Outputs
from .http.access_log import AccessRecord
from .http.deadline import seconds_allowed
from .http.encoding import dump
from .http.exchange import JSON_TYPE, ClientGoneError, HttpExchange, KeyOwner
from .http.json_body import parse_json
from .http.keep_alive import keep_alive
from .http.memory_budget import MemoryBudget, MemoryShare
from .http.parsing import ParserPools
from .node_request import LATE
from .options import RouterOptions
from .serve_request import serve
from .served_model import ServedModel
from .surface import ResponseFormatter, Surface
from .telemetry.metrics import Metrics
from .telemetry.request_metrics import RequestMetrics
from .write_outputs import collect_outputs, stream_outputs

log = logger("router")

# Unknown fields to log; clients can send any number of names.
MAX_NAMED_FIELDS = 64
# Time limit for the work after the end of a response.
CLEANUP_SECONDS = 5.0
# The parser pools' client for requests without a connection.
BACKGROUND_CLIENT = "background"

T = TypeVar("T")
# Computes a response from a body; adds the body's unknown fields to the set.
Work = Callable[[Any, ServedModel, set[str]], dict[str, Any]]


@dataclass
class DetachedRequest:
    """A request without a connection."""

    owner: KeyOwner
    access: AccessRecord
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # for the response


class UnknownFields:
    """Logs each unknown field once, since it may be misspelt; with ``strict``, rejects them."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def note(self, names: Set[str]) -> None:
        """Log the unknown fields of one request. Raises ``RequestError`` if strict."""
        if names and self._strict:
            name = min(names)
            message = f"Unknown parameter: '{name}'; this server rejects unknown parameters."
            raise invalid(message, name, "unknown_parameter")
        for name in sorted(names - self._logged):
            if len(self._logged) < MAX_NAMED_FIELDS:
                self._logged.add(name)
                log.warning("requests have the field %r, which is unknown and ignored", name)


class GenerateHandler:
    """Handles generation requests, within limits on the memory that all of them hold together."""

    def __init__(
        self,
        options: RouterOptions,
        nodes: NodeTable,
        registry: Registry,
        metrics: Metrics,
        tracer: Tracer,
        limits: RateLimits,
    ) -> None:
        self._options = options
        self._nodes = nodes
        self._registry = registry
        self.metrics = metrics
        self._tracer = tracer
        self._limits = limits
        self.parsers = ParserPools(options.parse_timeout)
        self._tasks: set[asyncio.Task[None]] = set()
        body_bytes = max(options.max_held_body_bytes, options.max_body_bytes)
        self.bodies = MemoryBudget(body_bytes, "bytes of bodies")
        self.prompts = MemoryBudget(options.max_held_prompt_tokens, "prompt tokens")
        self.responses = MemoryBudget(options.max_held_response_bytes, "bytes of responses")
        self.active = 0  # requests in progress
        self._unknown = UnknownFields(strict=options.strict_parameters)

    def abort(self) -> None:
        """End every request in progress with an error."""
        for task in tuple(self._tasks):
            task.cancel()

    def close(self) -> None:
        self.parsers.close()

    async def handle(self, exchange: HttpExchange, surface: Surface) -> None:
        """Handle one request. The caller writes errors."""
        async with self.parsing(exchange, surface) as (request, deadline):
            await self.respond(exchange, surface, request, deadline)

    @asynccontextmanager
    async def parsing(
        self, exchange: HttpExchange, surface: Surface
    ) -> AsyncIterator[tuple[GenerationRequest, float]]:
        """Parse a request, which counts as in progress inside the block. Yields it with its
        deadline in the event loop's time."""

        def parse(body: Any, model: ServedModel) -> GenerationRequest:
            return surface.parse(body, model, self._options)

        traceparent = exchange.header(b"traceparent").decode("latin-1")
        attributes = {"request_id": exchange.request_id, "route": exchange.path}
        if exchange.access.key:
            attributes["key"] = exchange.access.key
        seconds = seconds_allowed(exchange, self._options.request_timeout)
        deadline = asyncio.get_running_loop().time() + seconds
        await self._limits.count_request(exchange)
        with self.slot(), serving(self._tracer, "request", traceparent, **attributes) as span:
            request = await _by(deadline, self._read(exchange, parse))
            self._unknown.note(request.ignored)
            span.set(**_attributes(request))
            yield request, deadline

    async def respond(
        self,
        exchange: HttpExchange,
        surface: Surface,
        request: GenerationRequest,
        deadline: float,
    ) -> None:
        """Serve a parsed request, and write the response."""
        formatter = surface.formatter(request, int(time.time()))
        async with self.room(exchange, request) as memory:
            outputs = self._outputs(surface, request, exchange.access, deadline)
            work = self._write(exchange, request, formatter, outputs, memory)
            await self._unless_gone(exchange, work, deadline)

    async def compute(self, exchange: HttpExchange, work: Work) -> None:
        """Respond with the value that ``work`` computes from the body in a thread."""
        await self._limits.count_request(exchange)
        ignored: set[str] = set()
        with self.slot(), self.responses.share() as memory:
            value = await self._read(exchange, lambda body, model: work(body, model, ignored))
            self._unknown.note(ignored)
            response = dump(value)
            memory.take(len(response))
            await exchange.respond(200, response, JSON_TYPE)

    async def parse_detached(
        self, client: DetachedRequest, size: int, parse: Callable[[ServedModel], GenerationRequest]
    ) -> GenerationRequest:
        """Parse a request without a connection in a thread; its body has ``size`` bytes."""
        await self._limits.count_request(client)
        model = self._registry.model()
        request = await self.parsers.run(BACKGROUND_CLIENT, size, lambda: parse(model))
        self._unknown.note(request.ignored)
        return request

    async def serve_detached(
        self,
        surface: Surface,
        request: GenerationRequest,
        formatter: ResponseFormatter,
        access: AccessRecord,
        memory: MemoryShare,
        deadline: float | None = None,
    ) -> Any:
        """Serve a request without a connection, inside its ``room``. Returns the body for
        ``dump``."""
        if deadline is None:
            deadline = asyncio.get_running_loop().time() + self._options.request_timeout
        with serving(self._tracer, "request", "", route=surface.path) as span:
            span.set(**_attributes(request))
            outputs = self._outputs(surface, request, access, deadline)
            return await _by(deadline, self._whole(request, formatter, outputs, access, memory))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that outlives its exchange; ``abort`` cancels it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait_for_background(self) -> None:
        """Wait until all spawned work has ended."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    @asynccontextmanager
    async def room(
        self, client: LimitedRequest, request: GenerationRequest
    ) -> AsyncIterator[MemoryShare]:
        """Reserve a request's tokens from its key's limit, and memory for its prompts and its
        response."""
        tokens = request.prompt_tokens, request.output_token_limit
        with (
            await self._limits.reserve(client, *tokens),
            self.prompts.share() as prompts,
            self.responses.share() as memory,
        ):
            prompts.take(request.prompt_tokens)
            yield memory

    @contextmanager
    def slot(self) -> Iterator[None]:
        """A slot of the limit on requests in progress."""
        if self.active >= self._options.max_concurrent_requests:
            raise OverloadedError(
                f"The server has {self.active} requests in progress, which is its limit; try "
                "again later."
            )
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    async def _read(self, exchange: HttpExchange, parse: Callable[[Any, ServedModel], T]) -> T:
        """Parse the JSON of the body, and apply ``parse`` to it in a thread."""
        with self.bodies.share() as share:
            body = await exchange.body(share)
            model = self._registry.model()

            def parsed() -> T:
                return parse(parse_json(body), model)

            return await self.parsers.run(exchange.client, share.size, parsed)

    async def _unless_gone(
        self, exchange: HttpExchange, work: Coroutine[Any, Any, None], deadline: float
    ) -> None:
        """Run ``work``; cancel it at its deadline, or when the client disconnects."""
        remaining = deadline - asyncio.get_running_loop().time()
        task = asyncio.create_task(work)
        disconnect = asyncio.create_task(exchange.wait_for_disconnect())
        self._tasks.add(task)
        try:
            await asyncio.wait(
                (task, disconnect), timeout=remaining, return_when=asyncio.FIRST_COMPLETED
            )
            # The end of a response looks like a disconnect.
            if exchange.complete and not task.done():
                await asyncio.wait((task,), timeout=CLEANUP_SECONDS)
            if not task.done():
                raise ClientGoneError if disconnect.done() else DeadlineError(LATE)
            if task.cancelled():
                message = "The server is stopping; send the request again."
                raise DrainingError(message, code="server_draining")
            task.result()
        finally:
            self._tasks.discard(task)
            for each in (task, disconnect):
                each.cancel()
            await asyncio.gather(task, disconnect, return_exceptions=True)

    async def _write(
        self,
        exchange: HttpExchange,
        request: GenerationRequest,
        formatter: ResponseFormatter,
        outputs: Outputs,
        memory: MemoryShare,
    ) -> None:
        access = exchange.access
        if not request.stream:
            body = await self._whole(request, formatter, outputs, access, memory)
            await exchange.respond_json(200, body)
            return
        formatter.account_in(memory)
        with RequestMetrics(self.metrics, request, access) as metrics:
            async with aclosing(outputs), keep_alive(exchange, formatter.ping()):
                await stream_outputs(exchange, outputs, metrics, formatter)

    def _outputs(
        self,
        surface: Surface,
        request: GenerationRequest,
        access: AccessRecord,
        deadline: float,
    ) -> Outputs:
        def new_dispatcher() -> Dispatcher:
            return Dispatcher(self._nodes, self._options, deadline)

        def generate(one: GenerationRequest) -> Outputs:
            return serve(one, new_dispatcher, access.usage)

        return surface.outputs(request, generate)

    async def _whole(
        self,
        request: GenerationRequest,
        formatter: ResponseFormatter,
        outputs: Outputs,
        access: AccessRecord,
        memory: MemoryShare,
    ) -> Any:
        """The body of a response that is not streamed, for ``dump``."""
        usage = access.usage
        collector = formatter.collector(request, memory)
        with RequestMetrics(self.metrics, request, access) as metrics:
            async with aclosing(outputs):
                await collect_outputs(outputs, metrics, collector.add)
            metrics.finish(usage)
        result = collector.result(usage)
        if result.vectors:  # slow: scores are computed from many products
            body = await asyncio.to_thread(formatter.whole, result)
        else:
            body = formatter.whole(result)
        await formatter.store()
        return body


async def _by(deadline: float, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``. Raises ``DeadlineError`` if it does not end by ``deadline``."""
    try:
        async with asyncio.timeout_at(deadline):
            return await work
    except TimeoutError:
        raise DeadlineError(LATE) from None


def _attributes(request: GenerationRequest) -> dict[str, Value]:
    """Attributes of the request's span, without any text."""
    return {
        "response_id": request.request_id,
        "model": request.model.name,
        "prompts": len(request.prompts),
        "prompt_tokens": request.prompt_tokens,
        "choices": request.choices,
        "stream": request.stream,
    }
