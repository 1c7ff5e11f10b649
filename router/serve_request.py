"""Serve one request: the router's whole work in one place.

    GenerationRequest -> message for each prompt -> node -> its events -> PromptOutputs -> outputs

Streamed and unary responses are both built from the outputs of ``serve``, so they cannot differ. A
token passes four stages: ``NodeRequest.read``, ``Dispatcher.events``, ``_serve_prompt``, and the
function that writes it. A queue before the last stage merges the outputs of several prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from ..shared.errors import OverloadedError, UnavailableError
from .beams.serve import NewDispatcher, serve_beams
from .dispatch import Dispatcher
from .errors import DrainingError, NodeError
from .generation import GenerationRequest, Output, Outputs, RequestAdmitted, generate_message
from .prompt_outputs import PromptOutputs
from .usage import Usage

# Prompts of one request that are on nodes at the same time. The client gets status 200 once all
# prompts of the first wave are admitted.
WAVE = 64
QUEUED_OUTPUTS = 256  # items of ``Outputs``, over all prompts

Queue = asyncio.Queue[Sequence[Output] | Exception | None]


def serve(request: GenerationRequest, new_dispatcher: NewDispatcher, usage: Usage) -> Outputs:
    """Yield ``RequestAdmitted``, then the deltas of all choices in any order until all have
    finished. Fills ``usage`` on the way. Each prompt, or step of a beam, gets a new dispatcher."""
    runs = [
        _serve_prompt(request, number, new_dispatcher(), usage)
        if request.beams is None
        else serve_beams(request, number, new_dispatcher, usage)
        for number in range(len(request.prompts))
    ]
    return runs[0] if len(runs) == 1 else _merge(runs)


async def _serve_prompt(
    request: GenerationRequest, number: int, dispatcher: Dispatcher, usage: Usage
) -> Outputs:
    """Serve one prompt and its n choices, on one node at a time."""
    tokens = request.prompts[number].tokens
    usage.prompt_tokens += len(tokens)
    prompt = PromptOutputs(request, number)
    message = generate_message(request, number)
    try:
        async with aclosing(dispatcher.events(message, tokens, prompt.resume)) as events:
            async for node, node_events in events:
                if prompt.node is not node:
                    if prompt.node is None:
                        usage.served.append(prompt.served)
                    prompt.move_to(node)
                outputs = prompt.take(node_events)
                # Before the yield: a client that reads slowly would keep the choice running.
                for index in prompt.stopped and prompt.take_stopped():
                    node.end_choice(message.internal_id, index)
                if outputs:
                    yield outputs
                if prompt.finished:
                    # Returning cancels the request, so the node stops after a stop string too.
                    prompt.account(usage)
                    return
    except (OverloadedError, UnavailableError) as error:
        # Status 200 has been sent, so this can no longer become a 503 that asks for a retry.
        if request.stream and prompt.has_output and not isinstance(error, DrainingError):
            raise NodeError("The node that served this request failed.") from error
        raise
    raise NodeError("The node ended the request before it was finished.")


async def _merge(runs: list[Outputs]) -> Outputs:
    """Yield the outputs of all runs as they arrive, ``WAVE`` runs at a time. The first failure ends
    all runs. Yields nothing before the whole first wave is admitted."""
    queue: Queue = asyncio.Queue(QUEUED_OUTPUTS)
    slots = asyncio.Semaphore(WAVE)
    tasks: list[asyncio.Task[None]] = []
    running, not_admitted = len(runs), min(len(runs), WAVE)
    early: list[Sequence[Output]] = []
    try:
        for run in runs:
            tasks.append(asyncio.create_task(_pump(run, slots, queue)))
            await asyncio.sleep(0)  # let other requests run
        while running:
            outputs = await queue.get()
            if isinstance(outputs, Exception):
                raise outputs
            if outputs is None:
                running -= 1
            elif not_admitted > 0:
                early.append(outputs)
                not_admitted -= isinstance(outputs[0], RequestAdmitted)
                if not_admitted == 0:
                    for outputs in early:
                        yield outputs
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
            async for batch in outputs:
                await queue.put(batch)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
