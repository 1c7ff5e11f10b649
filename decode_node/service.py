"""``tandem.v1.Decode``: one request, all its choices, from admission to the last token."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from ..proto import tandem_pb2 as pb
from ..proto.tandem_pb2_grpc import DecodeServicer
from ..shared.engine.plan import PositionLogprobs
from ..shared.engine.sequence import FinishReason, Sequence, StepOutput
from ..shared.engine.start import NodeEngine, NodeIdentity
from ..shared.errors import NODE_DRAINING, OverloadedError, RequestError, UnavailableError
from ..shared.node.calls import serving_call
from ..shared.process.uninterrupted import uninterrupted
from ..shared.telemetry.tracing import NO_TRACER, Tracer
from .choices import Choices
from .embedding import embedding_event
from .examine import Examiner
from .generate_request import admitted_sequences
from .prompt_deaths import GivenUpError, PromptDeaths
from .request_span import RequestSpan
from .transfers import PrefillSource, Transfers
from .wide_logprobs import check_logprobs

log = logging.getLogger("tandem.decode")

DEFAULT_DEADLINE_SECONDS = 3600.0
# Logprobs of prompt tokens that go into one event, unless one token has more: a few milliseconds.
PIECE_LOGPROBS = 64 * 21

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.COMPUTED: pb.FINISH_REASON_STOP,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
    FinishReason.CANCELLED: pb.FINISH_REASON_ERROR,
}


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One ``Generate`` RPC that has been admitted."""

    request: pb.GenerateRequest
    choices: Choices
    seconds: float  # until the request's deadline, from its admission
    deaths: PromptDeaths
    prefill: asyncio.Task[PrefillSource]
    task: asyncio.Task[Any]


class DecodeService(DecodeServicer):
    """Serves requests on one node's engine. The RPC owns the request: when the RPC ends, for any
    reason, everything that the request holds is freed."""

    def __init__(
        self,
        engine: NodeEngine,
        identity: NodeIdentity,
        transfers: Transfers,
        examiner: Examiner,
        status: Callable[[], pb.StatusReply],
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._transfers = transfers
        self._examiner = examiner
        self._status = status
        self._tracer = tracer
        self._calls: set[_Call] = set()
        self._choices: dict[int, Choices] = {}  # by the router's id of the call
        self.draining = False
        self._cut_off = False

    @property
    def requests(self) -> int:
        return len(self._calls)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateEvent]:
        with serving_call(
            self._tracer,
            "Decode.Generate",
            context,
            node=self._identity.node_id,
            prompt_tokens=len(request.prompt),
            choices=request.sampling.n,
        ):
            call = await self._begin(request, context)
            try:
                yield pb.GenerateEvent(admitted=pb.Admitted(node_epoch=self._identity.epoch))
                async with asyncio.timeout(call.seconds):
                    while (death := await call.deaths.events.get()) is not None:
                        yield death
                    source = await call.prefill
                    with RequestSpan(source) as span:
                        while (output := await call.choices.next()) is not None:
                            for event in self._events(call, source, output, span):
                                yield event
            except (TimeoutError, UnavailableError, GivenUpError, asyncio.CancelledError) as error:
                await self._abort(call, error, context)
                raise
            finally:
                await uninterrupted(self._end(call))

    async def _begin(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> _Call:
        """Admit the request and begin to prefill it. The caller must ``_end`` it."""
        choices = Choices(self._engine.core, await self._admit(request, context))
        choices.listen()
        task = asyncio.current_task()
        assert task is not None, "gRPC runs a call in a task"
        seconds = request.deadline_seconds or DEFAULT_DEADLINE_SECONDS
        deaths = PromptDeaths(request.deaths)
        prefill = asyncio.create_task(
            self._transfers.prefill_remotely(
                choices.leader, list(request.prefill), time.monotonic() + seconds, deaths
            )
        )
        prefill.add_done_callback(lambda _: deaths.close())
        call = _Call(request, choices, seconds, deaths, prefill, task)
        self._calls.add(call)
        self._choices[request.call_id] = choices
        return call

    async def _admit(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> list[Sequence]:
        try:
            if self.draining:
                raise UnavailableError(NODE_DRAINING)
            check_logprobs(request, [call.request for call in self._calls])
            return await admitted_sequences(request, self._engine)
        except RequestError as error:
            body = {"message": str(error), "param": error.param, "code": error.code}
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, json.dumps(body))
        except OverloadedError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except UnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError("abort returned")

    def _events(
        self, call: _Call, source: PrefillSource, output: StepOutput, span: RequestSpan
    ) -> Iterator[pb.GenerateEvent]:
        """One step's output of one choice, as events for the router."""
        sequence = output.sequence
        computed = output.finish_reason is FinishReason.COMPUTED
        if sequence is call.choices.leader and (output.prompt_done or computed):
            source.clock.sampled(sequence.started_at, remote=bool(sequence.received))
            span.prompt_computed(source.clock.spent)
            yield _usage(sequence, source)
            if sequence.params.prompt_logprobs is not None:
                yield from _prompt_logprobs(sequence, call.request.split_prompt_logprobs)
        if computed:
            yield embedding_event(sequence, call.request.embed)
        if output.tokens:
            span.output(len(output.tokens))
            yield _tokens(output)
        if output.finish_reason is FinishReason.ERROR:
            self._engine.core.check_ranks()  # the node's failure, not the request's
        if output.finish_reason is not None:
            yield _finished(output)

    async def _abort(
        self,
        call: _Call,
        error: BaseException,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """End the RPC with the status of the error. Returns if the client has cancelled it."""
        if isinstance(error, TimeoutError):
            reason = f"the request took longer than {call.seconds:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, reason)
        if isinstance(error, UnavailableError):
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        if isinstance(error, GivenUpError):
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        if self._cut_off:
            reason = f"{NODE_DRAINING}, and its drain timeout is over"
            await context.abort(grpc.StatusCode.UNAVAILABLE, reason)

    async def _end(self, call: _Call) -> None:
        """Free everything, whatever the request was doing."""
        self._calls.discard(call)
        self._choices.pop(call.request.call_id, None)
        if not call.prefill.done():
            call.prefill.cancel()
        await asyncio.wait([call.prefill])
        if not call.prefill.cancelled() and call.prefill.exception() is not None:
            log.error("a request could not start", exc_info=call.prefill.exception())
        call.choices.cancel()

    def cut_off(self) -> None:
        """End the requests that still run when the drain timeout is over."""
        self._cut_off = True
        for call in tuple(self._calls):
            call.task.cancel()

    async def EndChoice(
        self, request: pb.EndChoiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.EndChoiceReply:
        choices = self._choices.get(request.call_id)
        if choices is not None:  # else all of them have ended meanwhile
            choices.stop(request.index)
        return pb.EndChoiceReply()

    async def Status(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.StatusReply:
        return self._status()

    async def Examine(
        self, request: pb.ExamineRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExamineReply:
        if self._examiner.busy:
            busy = "another examination of this node is under way; try again soon"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, busy)
        return await self._examiner.examine(request.prefill)


def _usage(sequence: Sequence, source: PrefillSource) -> pb.GenerateEvent:
    remote = bool(sequence.received)
    return pb.GenerateEvent(
        usage=pb.Usage(
            prompt_tokens=len(sequence.prompt),
            cached_tokens=sequence.cached,
            remote_tokens=sequence.received,
            remote_cached_tokens=source.cached if remote else 0,
            prefill_node=source.node if remote else "",
            local_reason="" if remote else source.reason,
            first_token=source.clock.spent,
        )
    )


def _tokens(output: StepOutput) -> pb.GenerateEvent:
    return pb.GenerateEvent(
        tokens=pb.Tokens(
            index=output.sequence.index,
            tokens=output.tokens,
            logprobs=[_listed(item, output.sequence) for item in output.logprobs],
        )
    )


def _prompt_logprobs(sequence: Sequence, split: bool) -> Iterator[pb.GenerateEvent]:
    """At least one event. In pieces, other requests proceed in between, here and in the router;
    older routers take a single event only."""
    found = sequence.prompt_logprobs
    listed = 1 + (sequence.params.prompt_logprobs or 0)
    step = max(1, PIECE_LOGPROBS // listed if split else len(found))
    for start in range(0, max(1, len(found)), step):
        positions = [_position(item) for item in found[start : start + step]]
        yield pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(positions=positions))


def _finished(output: StepOutput) -> pb.GenerateEvent:
    sequence, scored = output.sequence, output.stop_logprobs
    assert sequence.finish_reason is not None
    return pb.GenerateEvent(
        finished=pb.Finished(
            index=sequence.index,
            reason=_REASONS[sequence.finish_reason],
            stop_token=sequence.stop_token,
            error=sequence.error,
            stop_logprobs=None if scored is None else _listed(scored, sequence),
        )
    )


def _listed(item: PositionLogprobs, sequence: Sequence) -> pb.PositionLogprobs:
    return _position(item, ranked=not sequence.params.logprob_token_ids)


def _position(item: PositionLogprobs, *, ranked: bool = True) -> pb.PositionLogprobs:
    """Ranks of the listed tokens are known only of the most likely ones; 0 stands for unknown."""
    return pb.PositionLogprobs(
        chosen=pb.TokenLogprob(token=item.token, logprob=item.logprob, rank=item.rank),
        top=[
            pb.TokenLogprob(token=token, logprob=logprob, rank=rank if ranked else 0)
            for rank, (token, logprob) in enumerate(item.top, 1)
        ],
    )
