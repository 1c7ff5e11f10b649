"""Handle one HTTP request of a surface: parse the body, serve it, write the response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from ..shared.config.limits import BACKGROUND_PRIORITY
from ..shared.errors import OverloadedError
from ..shared.telemetry.logs import logger
from ..shared.telemetry.tracing import Tracer, Value, serving
from .access.rate_limits import LimitedRequest, RateLimits
from .cluster.node_table import NodeTable
from .cluster.registry_service import Registry
from .detached import DetachedRequest, run_detached
from .errors import DeadlineError, DrainingError
from .generation import GenerationRequest, Outputs
from .http.access_log import AccessRecord
from .http.deadline import seconds_allowed
from .http.encoding import encode
from .http.exchange import JSON_TYPE, ClientGoneError, HttpExchange
from .http.json_body import parse_pieces
from .http.keep_alive import kept_alive
from .http.memory_budget import MemoryBudget, MemoryShare
from .http.parsing import ParserPools
from .mcp.serve_rounds import serve_rounds
from .node_call import LATE
from .options import RouterOptions
from .requests.unknown_fields import UnknownFields
from .result import GenerationResult, ResultCollector
from .serve_request import serve
from .served_model import ServedModel
from .surface import BackgroundWork, HeldOutput, HeldResponse, Response, Surface
from .telemetry.metrics import Metrics
from .telemetry.request_metrics import RequestMetrics
from .write_outputs import collect_outputs, collect_wide, stream_outputs

log = logger("router")

# Arguments that are parsed within a millisecond.
SHORT_CALLS = 16 * 1024
# For what follows the end of a response.
CLEANUP_SECONDS = 5.0
# Turns of requests that come from no connection.
BACKGROUND_CLIENT = "background"

T = TypeVar("T")
# Makes an answer of a body; adds the body's unknown names to the set.
Work = Callable[[Any, ServedModel, set[str]], dict[str, Any]]


class GenerateHandler:
    """Requests to generate, and the limits on what all of them hold together."""

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
        self._parsers = ParserPools(options.parse_timeout)
        self._tasks: set[asyncio.Task[None]] = set()
        held = max(options.max_held_body_bytes, options.max_body_bytes)
        self.bodies = MemoryBudget(held, "bytes of bodies")
        self.prompts = MemoryBudget(options.max_held_prompt_tokens, "prompt tokens")
        self.answers = MemoryBudget(options.max_held_answer_bytes, "bytes of answers")
        self.active = 0  # requests in progress
        self._unknown = UnknownFields(strict=options.strict_parameters)

    def abort(self) -> None:
        """End every request in progress with an error."""
        for task in tuple(self._tasks):
            task.cancel()

    def close(self) -> None:
        self._parsers.close()

    async def handle(self, exchange: HttpExchange, surface: Surface) -> None:
        """Answer one request. Errors are the caller's to write."""

        def parse(body: Any, model: ServedModel) -> GenerationRequest:
            return surface.parse(body, model, self._options)

        traceparent = exchange.header(b"traceparent").decode("latin-1")
        about = {"request_id": exchange.request_id, "route": exchange.path}
        if exchange.access.key:
            about["key"] = exchange.access.key
        seconds = seconds_allowed(exchange, self._options.request_timeout)
        deadline = asyncio.get_running_loop().time() + seconds
        await self._limits.count_request(exchange)
        with self._slot(), serving(self._tracer, "request", traceparent, **about) as span:
            request = await _by(deadline, self._read(exchange, parse))
            self._unknown.note(request.ignored)
            span.set(**_attributes(request))
            response = surface.response(request, int(time.time()))
            if isinstance(response, HeldResponse) and response.background is not None:
                await self._detach(exchange, request, response, response.background, deadline)
                await self._answer_early(exchange, response, response.background)
                return
            reserved = await self._reserve(exchange, request)
            with reserved, self.prompts.share() as prompts, self.answers.share() as memory:
                prompts.take(request.prompt_tokens)
                work = self._answer(exchange, request, response, memory, deadline)
                await self._unless_gone(exchange, work, deadline)

    async def compute(self, exchange: HttpExchange, work: Work) -> None:
        """Answer with what ``work`` makes of the JSON of the body; it runs in a thread."""
        await self._limits.count_request(exchange)
        ignored: set[str] = set()
        with self._slot(), self.answers.share() as memory:
            made = await self._read(exchange, lambda body, model: work(body, model, ignored))
            self._unknown.note(ignored)
            answer = await encode(made)
            memory.take(sum(map(len, answer)))
            await exchange.respond_in_pieces(200, answer, JSON_TYPE)

    async def answer(
        self,
        surface: Surface,
        read: Callable[[ServedModel], Any],
        size: int,
        client: DetachedRequest,
    ) -> list[bytes]:
        """The answer to a request of no connection, whose body of ``size`` bytes ``read`` makes in
        a thread. It counts against the limits of its key. Nodes serve it after all others."""
        await self._limits.count_request(client)
        model = self._registry.model()

        def parse() -> GenerationRequest:
            parsed = surface.parse(read(model), model, self._options)
            return replace(parsed, stream=False, priority=BACKGROUND_PRIORITY)

        deadline = asyncio.get_running_loop().time() + self._options.request_timeout
        with serving(self._tracer, "request", "", route=surface.path) as span:
            request = await self._parsers.run(BACKGROUND_CLIENT, size, parse)
            self._unknown.note(request.ignored)
            span.set(**_attributes(request))
            response = surface.response(request, int(time.time()))
            reserved = await self._reserve(client, request)
            with reserved, self.prompts.share() as prompts, self.answers.share() as memory:
                prompts.take(request.prompt_tokens)
                work = self._whole(request, response, client.access, memory, deadline)
                return await _by(deadline, work)

    async def _reserve(
        self, exchange: LimitedRequest, request: GenerationRequest
    ) -> AbstractContextManager[None]:
        tokens = request.prompt_tokens, request.most_output_tokens
        return await self._limits.reserve(exchange, *tokens)

    async def _detach(
        self,
        exchange: HttpExchange,
        request: GenerationRequest,
        response: HeldResponse,
        work: BackgroundWork,
        deadline: float,
    ) -> None:
        """Serve a request whose client does not wait, within the same limits as any other."""
        work.access.key = exchange.access.key
        detached = DetachedRequest(exchange.owner, work.access, exchange.headers)
        with ExitStack() as limits:
            limits.enter_context(self._slot())
            limits.enter_context(await self._reserve(detached, request))
            limits.enter_context(self.prompts.share()).take(request.prompt_tokens)
            response.hold(limits.enter_context(self.answers.share()))
            if work.log is not None:
                work.log.hold(limits.enter_context(self.answers.share()))
            held = limits.pop_all()
        computed = _by(deadline, self._compute_detached(request, response, work, deadline))
        count_error = self.metrics.count_error
        run = run_detached(held, work, response, computed, self._options, count_error)
        task = asyncio.create_task(run)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        work.begun(task)

    async def _compute_detached(
        self,
        request: GenerationRequest,
        response: HeldResponse,
        work: BackgroundWork,
        deadline: float,
    ) -> None:
        usage = work.access.usage
        with RequestMetrics(self.metrics, request, work.access) as metrics:
            served = self._outputs(request, work.access, deadline)
            async with aclosing(served) as outputs:
                if work.log is not None:
                    await stream_outputs(work.log, outputs, metrics, response, wide=request.wide)
                else:
                    await collect_outputs(outputs, metrics, response.add)
                    metrics.finish(usage)
                    response.whole(GenerationResult([], usage=usage))

    async def _answer_early(
        self, exchange: HttpExchange, response: HeldResponse, work: BackgroundWork
    ) -> None:
        if work.log is not None:
            await self.follow(exchange, work.log.after(-1))
        else:
            await exchange.respond_in_pieces(200, await encode(response.so_far()), JSON_TYPE)

    async def follow(self, exchange: HttpExchange, events: AsyncGenerator[bytes, None]) -> None:
        """Write the events of a log to a client, until the last one."""

        async def write() -> None:
            await exchange.start_stream()
            async with aclosing(events) as bursts:
                async for burst in bursts:
                    await exchange.write(burst)
            await exchange.end_stream()

        deadline = asyncio.get_running_loop().time() + self._options.request_timeout
        await self._unless_gone(exchange, write(), deadline)

    async def ended(self) -> None:
        """Wait for what is computed in the background."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """The place of one request among those in progress."""
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
        """What ``parse`` makes of the JSON of the body, in a thread."""
        with self.bodies.share() as share:
            body = await exchange.body(share)
            model = self._registry.model()

            def parsed() -> T:
                return parse(parse_pieces(body, model.max_model_len), model)

            return await self._parsers.run(exchange.client, share.size, parsed)

    async def _unless_gone(
        self, exchange: HttpExchange, work: Coroutine[Any, Any, None], deadline: float
    ) -> None:
        """Run ``work``, and cancel it at its deadline and when the client disconnects."""
        left = deadline - asyncio.get_running_loop().time()
        task = asyncio.create_task(work)
        gone = asyncio.create_task(exchange.disconnected())
        self._tasks.add(task)
        try:
            await asyncio.wait((task, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if (
                exchange.complete and not task.done()
            ):  # the end of a response looks like a disconnect
                await asyncio.wait((task,), timeout=CLEANUP_SECONDS)
            if not task.done():
                raise ClientGoneError if gone.done() else DeadlineError(LATE)
            if task.cancelled():
                message = "The server is stopping; send the request again."
                raise DrainingError(message, code="server_draining")
            task.result()
        finally:
            self._tasks.discard(task)
            for each in (task, gone):
                each.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _answer(
        self,
        exchange: HttpExchange,
        request: GenerationRequest,
        response: Response,
        memory: MemoryShare,
        deadline: float,
    ) -> None:
        access = exchange.access
        if not request.stream:
            body = await self._whole(request, response, access, memory, deadline)
            await exchange.respond_in_pieces(200, body, JSON_TYPE)
            return
        if isinstance(response, HeldResponse):
            response.hold(memory)
        with RequestMetrics(self.metrics, request, access) as metrics:
            served = self._outputs(request, access, deadline)
            async with aclosing(served) as outputs, kept_alive(exchange, response):
                await stream_outputs(exchange, outputs, metrics, response, wide=request.wide)

    def _outputs(
        self, request: GenerationRequest, access: AccessRecord, deadline: float
    ) -> Outputs:
        """The outputs of a request, and of the rounds that follow it."""

        def generate(one: GenerationRequest) -> Outputs:
            return serve(one, self._nodes, self._options, access.usage, deadline)

        if request.rounds is None:
            return generate(request)
        return serve_rounds(request, access, generate, self._parsers, self.prompts)

    async def _whole(
        self,
        request: GenerationRequest,
        response: Response,
        access: AccessRecord,
        memory: MemoryShare,
        deadline: float,
    ) -> list[bytes]:
        """The JSON of an answer that is not streamed."""
        usage = access.usage
        collector = _collector(request, response, memory)
        with RequestMetrics(self.metrics, request, access) as metrics:
            served = self._outputs(request, access, deadline)
            async with aclosing(served) as outputs:
                if request.wide and isinstance(collector, ResultCollector):
                    await collect_wide(outputs, metrics, collector)
                else:
                    await collect_outputs(outputs, metrics, collector.add)
            metrics.finish(usage)
        result = collector.result(usage)
        if result.call_characters <= SHORT_CALLS and not result.vectors:
            return await encode(response.whole(result))
        # Some APIs have the arguments of calls as objects, which takes long for long ones, and
        # scores are products of many vectors.
        return await encode(await asyncio.to_thread(response.whole, result))


def _collector(
    request: GenerationRequest, response: Response, memory: MemoryShare
) -> ResultCollector | HeldOutput:
    if isinstance(response, HeldResponse):
        return HeldOutput(response, memory)
    return ResultCollector(request, response.choice_logprobs, response.prompt_logprobs, memory)


async def _by(deadline: float, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``. Raises ``DeadlineError`` if it lasts longer than the request may."""
    try:
        async with asyncio.timeout_at(deadline):
            return await work
    except TimeoutError:
        raise DeadlineError(LATE) from None


def _attributes(request: GenerationRequest) -> dict[str, Value]:
    """The attributes of the request's span; none of its text."""
    return {
        "answer_id": request.request_id,
        "model": request.model.name,
        "prompts": len(request.prompts),
        "prompt_tokens": request.prompt_tokens,
        "choices": request.choices,
        "stream": request.stream,
    }
