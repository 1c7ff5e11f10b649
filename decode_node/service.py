"""``tandem.v1.Decode``: one request, all its choices, from admission to the last token."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from ..proto import tandem_pb2 as pb
from ..proto.tandem_pb2_grpc import DecodeServicer
from ..shared.engine.sequence import FinishReason, Sequence, StepOutput
from ..shared.engine.start import NodeEngine, NodeIdentity
from ..shared.engine.work import Generate
from ..shared.errors import (
    NODE_DRAINING,
    ModelError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from ..shared.node.rpc_context import RpcContext, serving_rpc
from ..shared.process.tasks import uninterrupted
from ..shared.process.threads import in_thread
from ..shared.security.credentials import INSECURE, Credentials
from ..shared.security.token_interceptor import request_token, token_problem
from ..shared.telemetry.tracing import NO_TRACER, Tracer
from ..shared.text.tokenizer_message import pack_tokenizer
from ..shared.weights.source import open_source
from .choices import Choices
from .embedding import embedding_event
from .events import finished_event, prompt_logprobs_events, scored_event, usage_event
from .examine import Examiner
from .generate_request import admitted_sequences
from .prompt_deaths import GivenUpError, PromptDeaths
from .request_span import RequestSpan
from .streams.router_stream import RequestEndedError, RequestOutput, RouterStream
from .transfers import PrefillSource, Transfers

log = logging.getLogger("tandem.decode")

DEFAULT_DEADLINE_SECONDS = 3600.0
# Bytes of the tokenizer in one message.
TOKENIZER_PART = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    """One admitted request."""

    request: pb.GenerateRequest
    choices: Choices
    seconds: float  # from admission to the request's deadline
    deaths: PromptDeaths
    prefill: asyncio.Task[PrefillSource]
    task: asyncio.Task[Any]


class DecodeService(DecodeServicer):
    """Serves requests on one node's engine.

    ``_Running`` owns everything that a request holds; ``_end`` frees it, however the request ends.
    """

    def __init__(
        self,
        engine: NodeEngine,
        identity: NodeIdentity,
        transfers: Transfers,
        examiner: Examiner,
        status: Callable[[], pb.StatusReply],
        tracer: Tracer = NO_TRACER,
        credentials: Credentials = INSECURE,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._transfers = transfers
        self._examiner = examiner
        self._status = status
        self._tracer = tracer
        self._credentials = credentials
        self._streams: set[RouterStream] = set()
        self._running: set[_Running] = set()
        self._choices: dict[int, Choices] = {}  # by the router's internal id
        self._packing = asyncio.Lock()
        self._draining = False
        self._cut_off = False

    @property
    def requests(self) -> int:
        return len(self._running)

    @property
    def busy(self) -> bool:
        """True while a request runs or a stream has events to send."""
        return bool(self._running) or any(not stream.idle for stream in self._streams)

    def admit(self) -> None:
        """Accept requests again."""
        self._draining = False

    def drain(self) -> None:
        """Reject requests; streams end with their last request."""
        self._draining = True
        for stream in self._streams:
            stream.end()

    async def Stream(  # type: ignore[override]  # writes to its context
        self,
        requests: AsyncIterator[pb.StreamRequest],
        context: grpc.aio.ServicerContext[Any, pb.StreamEvents],
    ) -> None:
        stream = RouterStream(partial(self._serve, request_token(context)))
        self._streams.add(stream)
        try:
            await stream.run(requests, context)
        finally:
            self._streams.discard(stream)

    async def _serve(
        self,
        token: str | bytes,
        request: pb.GenerateRequest,
        context: RpcContext,
        out: RequestOutput,
    ) -> None:
        """Serve one request to its end. ``token`` came with the RPC that opened the stream.

        Raises ``RequestEndedError``."""
        if problem := token_problem(self._credentials, token):
            raise RequestEndedError(grpc.StatusCode.UNAUTHENTICATED, problem)
        with serving_rpc(
            self._tracer,
            "Decode.Stream",
            context,
            node=self._identity.node_id,
            prompt_tokens=len(request.prompt),
            choices=request.sampling.n,
        ):
            running = await self._begin(request)
            try:
                out.event(pb.GenerateEvent(admitted=pb.Admitted(node_epoch=self._identity.epoch)))
                async with asyncio.timeout(running.seconds):
                    await self._run(running, out)
            except (TimeoutError, UnavailableError, GivenUpError, asyncio.CancelledError) as error:
                raise self._end_error(running, error) from error
            finally:
                await uninterrupted(self._end(running))

    async def _run(self, running: _Running, out: RequestOutput) -> None:
        while (death := await running.deaths.events.get()) is not None:
            out.event(death)
        source = await running.prefill
        with RequestSpan(source) as span:
            await self._begin_output(running, source, span, out)
            await running.choices.deliver(lambda output: self._put(running, output, span, out))

    async def _begin_output(
        self, running: _Running, source: PrefillSource, span: RequestSpan, out: RequestOutput
    ) -> None:
        """Send all events up to the first tokens. The logprobs of a prompt take a while."""
        while (output := await running.choices.next()) is not None:
            sequence = output.sequence
            computed = output.finish_reason is FinishReason.COMPUTED
            begins = sequence is running.choices.leader and (output.prompt_done or computed)
            if begins:
                source.clock.sampled(output.started_at, remote=bool(sequence.received))
                span.prompt_computed(source.clock.durations)
                out.event(usage_event(sequence, source))
                await self._put_prompt_logprobs(running, out)
            if computed:
                out.event(embedding_event(sequence, running.request.embed, self._engine))
            self._put(running, output, span, out)
            if begins:
                return

    async def _put_prompt_logprobs(self, running: _Running, out: RequestOutput) -> None:
        leader = running.choices.leader
        if isinstance(leader.work, Generate) and leader.work.params.prompt_logprobs is not None:
            for event in prompt_logprobs_events(leader):
                out.event(event)
                await out.drain()

    def _put(
        self, running: _Running, output: StepOutput, span: RequestSpan, out: RequestOutput
    ) -> None:
        """Send one step's output of one choice."""
        if output.tokens:
            span.output(len(output.tokens))
            if output.logprobs:
                out.event(scored_event(output))
            else:
                out.tokens(output.sequence.index, output.tokens)
        if output.finish_reason is FinishReason.ERROR:
            self._engine.core.check_ranks()  # the node's failure, not the request's
        if output.finish_reason is not None:
            out.event(finished_event(output))

    async def _begin(self, request: pb.GenerateRequest) -> _Running:
        """Admit the request and start its prefill. The caller must ``_end`` it."""
        choices = Choices(self._engine.core, await self._admit(request))
        choices.listen()
        task = asyncio.current_task()
        assert task is not None, "a request is served in a task"
        seconds = request.deadline_seconds or DEFAULT_DEADLINE_SECONDS
        deaths = PromptDeaths(request.deaths)
        prefill = asyncio.create_task(
            self._transfers.prefill_remotely(
                choices.leader, list(request.prefill), time.monotonic() + seconds, deaths
            )
        )
        prefill.add_done_callback(lambda _: deaths.close())
        running = _Running(request, choices, seconds, deaths, prefill, task)
        self._running.add(running)
        self._choices[request.internal_id] = choices
        return running

    async def _admit(self, request: pb.GenerateRequest) -> list[Sequence]:
        try:
            if self._draining:
                raise UnavailableError(NODE_DRAINING)
            return await admitted_sequences(request, self._engine)
        except RequestError as error:
            body = {"message": str(error), "param": error.param, "code": error.code}
            status, details = grpc.StatusCode.INVALID_ARGUMENT, json.dumps(body)
        except OverloadedError as error:
            status, details = grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        except UnavailableError as error:
            status, details = grpc.StatusCode.UNAVAILABLE, str(error)
        raise RequestEndedError(status, details)

    def _end_error(self, running: _Running, error: BaseException) -> BaseException:
        """The status of a request that an error ended; the error itself if it was cancelled."""
        if isinstance(error, TimeoutError):
            details = f"the request took longer than {running.seconds:g} s"
            return RequestEndedError(grpc.StatusCode.DEADLINE_EXCEEDED, details)
        if isinstance(error, UnavailableError):
            return RequestEndedError(grpc.StatusCode.UNAVAILABLE, str(error))
        if isinstance(error, GivenUpError):
            return RequestEndedError(grpc.StatusCode.ABORTED, str(error))
        if self._cut_off:
            details = f"{NODE_DRAINING}, and its drain timeout is over"
            return RequestEndedError(grpc.StatusCode.UNAVAILABLE, details)
        return error

    async def _end(self, running: _Running) -> None:
        """Free everything, whatever the request was doing."""
        self._running.discard(running)
        self._choices.pop(running.request.internal_id, None)
        if not running.prefill.done():
            running.prefill.cancel()
        await asyncio.wait([running.prefill])
        if not running.prefill.cancelled() and running.prefill.exception() is not None:
            log.error("a request could not start", exc_info=running.prefill.exception())
        running.choices.cancel()

    def cut_off(self) -> None:
        """End the requests that still run after the drain timeout."""
        self._cut_off = True
        for running in tuple(self._running):
            running.task.cancel()

    async def EndChoice(
        self, request: pb.EndChoiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.EndChoiceReply:
        choices = self._choices.get(request.internal_id)
        if choices is not None:  # the request may have ended in the meantime
            choices.stop(request.index)
        return pb.EndChoiceReply()

    async def Status(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.StatusReply:
        return self._status()

    async def Tokenizer(
        self, request: pb.TokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.TokenizerPart]:
        source = open_source(self._engine.model_path)
        try:
            async with self._packing:  # one at a time: it takes several times the tokenizer's size
                data = await in_thread(lambda: pack_tokenizer(source.tokenizer_files()))
        except ModelError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        for begin in range(0, len(data), TOKENIZER_PART):
            yield pb.TokenizerPart(content=data[begin : begin + TOKENIZER_PART])

    async def Examine(
        self, request: pb.ExamineRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExamineReply:
        if self._examiner.busy:
            busy = "another examination of this node is under way; try again soon"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, busy)
        return await self._examiner.examine(request.prefill)
