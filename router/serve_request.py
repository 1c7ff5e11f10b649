"""Serve one request: the router's whole work in one place.

    GenerationRequest -> message for each prompt -> node -> its events -> PromptOutputs -> outputs

Streamed and unary responses are both made from the outputs of ``serve``, so they cannot differ. A
token passes four stages: ``NodeCall.read``, ``Dispatcher.events``, ``_serve_prompt``, and the
function that writes it. Those of several prompts pass a queue before the last, which merges them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial

from ..proto import tandem_pb2 as pb
from ..shared.errors import OverloadedError, UnavailableError
from .beams.serve_beams import serve_beams
from .calls.node_events import NodeEvent
from .cluster.node_table import NodeTable
from .dispatch import Dispatcher
from .errors import DrainingError, NodeError
from .generation import GenerationRequest, Output, Outputs, RequestAdmitted
from .http.slices import TimeSlices
from .options import RouterOptions
from .prompt_outputs import PromptOutputs
from .usage import Usage

# Prompts of one request that are on nodes at the same time; also how many must be admitted before
# the client gets status 200.
WAVE = 64
QUEUED_OUTPUTS = 256  # of all prompts, each time those that arrived together
# Tokens of a prompt that are copied into a message at once.
PIECE_TOKENS = 8192

NewMessage = Callable[[], Awaitable[pb.GenerateRequest]]
Queue = asyncio.Queue[Sequence[Output] | Exception | None]


def serve(
    request: GenerationRequest,
    nodes: NodeTable,
    options: RouterOptions,
    usage: Usage,
    deadline: float,
) -> Outputs:
    """``RequestAdmitted``, then the deltas of all choices in any order, until all have finished.

    ``usage`` is filled on the way. ``deadline`` is by the loop's clock.
    """

    def new_dispatcher() -> Dispatcher:
        return Dispatcher(nodes, options, deadline)

    turn = asyncio.Lock()
    messages = [partial(_message, request, number, turn) for number in range(len(request.prompts))]
    runs = [
        _serve_prompt(request, number, message, new_dispatcher(), usage)
        if request.beams is None
        else serve_beams(request, number, message, new_dispatcher, usage)
        for number, message in enumerate(messages)
    ]
    return runs[0] if len(runs) == 1 else _merged(runs)


async def _serve_prompt(
    request: GenerationRequest,
    number: int,
    new_message: NewMessage,
    dispatcher: Dispatcher,
    usage: Usage,
) -> Outputs:
    """Serve one prompt and its n choices, on one node at a time."""
    tokens = request.prompts[number].tokens
    usage.prompt_tokens += len(tokens)
    prompt = PromptOutputs(request, number)
    message = await new_message()
    try:
        async with aclosing(dispatcher.events(message, tokens, prompt.resume)) as events:
            async for node, arrived in events:
                if prompt.node is not node:
                    if prompt.node is None:
                        usage.served.append(prompt.served)
                    prompt.move_to(node)
                outputs = await _taken(prompt, arrived)
                # At once, because a client that reads slowly would keep the choice running.
                for index in prompt.stopped and prompt.take_stopped():
                    node.end_choice(message.call_id, index)
                if outputs:
                    yield outputs
                if prompt.finished:
                    # Leaving cancels the call, so that the node stops after a stop string too.
                    prompt.account(usage)
                    return
    except (OverloadedError, UnavailableError) as error:
        # In the middle of a stream it is no matter of load, and there is no status to send.
        if request.stream and prompt.begun and not isinstance(error, DrainingError):
            raise NodeError("The node that served this request failed.") from error
        raise
    raise NodeError("The node ended the request before it was finished.")


async def _taken(prompt: PromptOutputs, events: Sequence[NodeEvent]) -> Sequence[Output]:
    """The outputs of events that arrived together. Many do not hold the event loop."""
    if len(events) <= 1:
        return prompt.take(events)
    outputs: list[Output] = []
    slices = TimeSlices()
    for event in events:
        outputs += prompt.take((event,))
        await slices.checkpoint()
    return outputs


async def _merged(runs: list[Outputs]) -> Outputs:
    """The outputs of all runs as they arrive, from ``WAVE`` runs at a time. The first failure ends
    all runs. Nothing is yielded before a whole wave is admitted."""
    queue: Queue = asyncio.Queue(QUEUED_OUTPUTS)
    slots = asyncio.Semaphore(WAVE)
    tasks = [asyncio.create_task(_pump(run, slots, queue)) for run in runs]
    running, not_admitted = len(tasks), min(len(tasks), WAVE)
    early: list[Output] = []
    try:
        while running:
            outputs = await queue.get()
            if isinstance(outputs, Exception):
                raise outputs
            if outputs is None:
                running -= 1
            elif not_admitted > 0:
                early += outputs
                not_admitted -= isinstance(outputs[0], RequestAdmitted)
                if not_admitted == 0:
                    yield early
            else:
                yield outputs
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(run: Outputs, slots: asyncio.Semaphore, queue: Queue) -> None:
    """Put the outputs of one run into ``queue``, then ``None``, or the exception that ended it."""
    try:
        async with slots, aclosing(run) as outputs:
            async for arrived in outputs:
                await queue.put(arrived)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)


async def _message(
    request: GenerationRequest, number: int, turn: asyncio.Lock
) -> pb.GenerateRequest:
    """The message for the node, without its deadline and its prefill candidates. The prompts of a
    request take turns, so that not all of them are copied before any other task runs."""
    async with turn:
        message = await _filled(request, number)
        if len(request.prompts) > 1:
            await asyncio.sleep(0)
    return message


async def _filled(request: GenerationRequest, number: int) -> pb.GenerateRequest:
    sampling = pb.Sampling()
    sampling.CopyFrom(request.sampling)
    sampling.max_tokens = request.max_tokens[number]
    sampling.min_tokens = request.text.min_tokens
    if not sampling.HasField("seed"):  # else no other node could continue what one has begun
        sampling.seed = secrets.randbits(63)
    if request.wants_logprobs and not request.text.discard_output:
        sampling.logprobs = request.logprobs or 0
    if request.prompt_alternatives is not None:
        sampling.prompt_logprobs = request.prompt_alternatives
    suffix = f"-{number}" if len(request.prompts) > 1 else ""
    message = pb.GenerateRequest(
        request_id=request.request_id + suffix,
        sampling=sampling,
        priority=request.priority,
        cache_salt=request.cache_salt,
        split_prompt_logprobs=True,
        packed_logprobs=True,
        embed=None if request.embed is None else request.embed.message(request.prompts[number]),
    )
    tokens, slices = memoryview(request.prompts[number].tokens), TimeSlices()
    for start in range(0, len(tokens), PIECE_TOKENS):
        message.prompt.extend(tokens[start : start + PIECE_TOKENS])
        await slices.checkpoint()
    return message
