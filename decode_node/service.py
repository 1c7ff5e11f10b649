"""``tandem.v1.Decode``: one request, all its choices, from admission to the last token."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
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
from .deaths import GivenUpError, PromptDeaths
from .examine import Examiner
from .generate_request import admitted_sequences
from .request_span import RequestSpan
from .transfers import Outcome, Transfers

log = logging.getLogger("tandem.decode")

DEFAULT_DEADLINE_SECONDS = 3600.0
# Prompt tokens whose logprobs go into one event: with twenty alternatives each, a few milliseconds.
PIECE_POSITIONS = 64

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
    FinishReason.CANCELLED: pb.FINISH_REASON_ERROR,
}


class DecodeService(DecodeServicer):
    """Serves requests on one node's engine. The RPC owns the request: when it ends, for whatever
    reason, so does everything the request holds."""

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
        self._calls: dict[int, Choices] = {}
        self.requests = 0
        self.draining = False
        self._running: set[asyncio.Task[Any]] = set()
        self._cut = False

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
            async with aclosing(self._generate(request, context)) as events:
                async for event in events:
                    yield event

    async def _generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        choices = Choices(self._engine.core, await self._admit(request, context))
        choices.listen()
        self._calls[request.call_id] = choices
        self.requests += 1
        task = asyncio.current_task()
        assert task is not None, "gRPC runs a call in a task"
        self._running.add(task)
        seconds = request.deadline_seconds or DEFAULT_DEADLINE_SECONDS
        deadline = time.monotonic() + seconds
        deaths = PromptDeaths(request.deaths)
        start = asyncio.create_task(
            self._transfers.prefill_remotely(
                choices.leader, list(request.prefill), deadline, deaths
            )
        )
        start.add_done_callback(lambda _: deaths.over())
        try:
            yield pb.GenerateEvent(admitted=pb.Admitted(node_epoch=self._identity.epoch))
            async with asyncio.timeout(seconds):
                while (death := await deaths.news.get()) is not None:
                    yield death
                outcome = await start
                async for event in self._events(choices, outcome, request):
                    yield event
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the request took longer than {seconds:g} s",
            )
        except UnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except GivenUpError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        except asyncio.CancelledError:
            if self._cut:
                message = f"{NODE_DRAINING}, and its time is over"
                await context.abort(grpc.StatusCode.UNAVAILABLE, message)
            raise
        finally:
            self._running.discard(task)
            self.requests -= 1
            self._calls.pop(request.call_id, None)
            await uninterrupted(self._end(start, choices))

    def cut_off(self) -> None:
        """End what still runs, and say why: the time for draining is over."""
        self._cut = True
        for task in tuple(self._running):
            task.cancel()

    async def EndChoice(
        self, request: pb.EndChoiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.EndChoiceReply:
        choices = self._calls.get(request.call_id)
        if choices is not None:  # or all of them have ended meanwhile
            choices.end(request.index)
        return pb.EndChoiceReply()

    async def Status(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.StatusReply:
        return self._status()

    async def Examine(
        self, request: pb.ExamineRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExamineReply:
        if self._examiner.busy:
            busy = "this node is being examined by somebody else; ask again soon"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, busy)
        return await self._examiner.examine(request.prefill)

    async def _admit(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> list[Sequence]:
        try:
            if self.draining:
                raise UnavailableError(NODE_DRAINING)
            return admitted_sequences(request, self._engine)
        except RequestError as error:
            body = {"message": str(error), "param": error.param, "code": error.code}
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, json.dumps(body))
        except OverloadedError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except UnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError("abort returned")

    async def _events(
        self, choices: Choices, outcome: Outcome, request: pb.GenerateRequest
    ) -> AsyncIterator[pb.GenerateEvent]:
        with RequestSpan(outcome) as trace:
            async for output in choices.outputs():
                sequence = output.sequence
                if sequence is choices.leader and output.prompt_done:
                    outcome.clock.sampled(sequence.started_at, remote=bool(sequence.received))
                    trace.prompt_computed(outcome.clock.spent)
                    yield self._usage(sequence, outcome)
                    if sequence.params.prompt_logprobs is not None:
                        for event in _prompt_logprobs(sequence, request.split_prompt_logprobs):
                            yield event
                if output.tokens:
                    trace.output(len(output.tokens))
                    yield _tokens(output)
                if output.finish_reason is FinishReason.ERROR:
                    self._engine.core.check_ranks()  # the node's failure, not the request's
                if output.finish_reason is not None:
                    yield _finished(sequence)

    async def _end(self, start: asyncio.Task[Outcome], choices: Choices) -> None:
        """Free everything, in every phase."""
        if not start.done():
            start.cancel()
        await asyncio.wait([start])
        if not start.cancelled() and start.exception() is not None:
            log.error("a request could not start", exc_info=start.exception())
        choices.cancel()

    def _usage(self, sequence: Sequence, outcome: Outcome) -> pb.GenerateEvent:
        remote = bool(sequence.received)
        return pb.GenerateEvent(
            usage=pb.Usage(
                prompt_tokens=len(sequence.prompt),
                cached_tokens=sequence.cached,
                remote_tokens=sequence.received,
                prefill_node=outcome.node if remote else "",
                local_reason="" if remote else outcome.reason,
                first_token=outcome.clock.spent,
            )
        )


def _tokens(output: StepOutput) -> pb.GenerateEvent:
    return pb.GenerateEvent(
        tokens=pb.Tokens(
            index=output.sequence.index,
            tokens=output.tokens,
            logprobs=[_position(item) for item in output.logprobs],
        )
    )


def _prompt_logprobs(sequence: Sequence, split: bool) -> Iterator[pb.GenerateEvent]:
    """One event at least. Between the pieces other requests go on, here and in the router; older
    routers take a single event only."""
    found = sequence.prompt_logprobs
    step = PIECE_POSITIONS if split else max(1, len(found))
    for start in range(0, max(1, len(found)), step):
        positions = [_position(item) for item in found[start : start + step]]
        yield pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(positions=positions))


def _finished(sequence: Sequence) -> pb.GenerateEvent:
    assert sequence.finish_reason is not None
    return pb.GenerateEvent(
        finished=pb.Finished(
            index=sequence.index,
            reason=_REASONS[sequence.finish_reason],
            stop_token=sequence.stop_token,
            error=sequence.error,
        )
    )


def _position(item: PositionLogprobs) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        chosen=pb.TokenLogprob(token=item.token, logprob=item.logprob, rank=item.rank),
        top=[
            pb.TokenLogprob(token=token, logprob=logprob, rank=rank)
            for rank, (token, logprob) in enumerate(item.top, 1)
        ],
    )
