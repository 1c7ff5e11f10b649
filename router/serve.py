"""Serve one request: the router's whole work in one place.

    Generation -> a message a prompt -> a node -> its events -> an attempt's choices -> deltas

Streamed and unary answers are both made from the items of ``serve``, so they cannot differ. A token
passes four stages: ``NodeCall.read``, ``Dispatcher.events``, ``_serve_prompt``, and the function
that writes it; only the tokens of several prompts pass a queue before that, which merges them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ..proto import tandem_pb2 as pb
from .attempt import NodeAttempt
from .cluster.node_table import NodeTable
from .dispatch import Dispatcher
from .errors import NodeError
from .generation import AdmittedItem, Generation, Item, Restarted, Usage
from .http.slices import Slices
from .options import RouterOptions

# Prompts of one request that are on nodes at the same time; also how many must be admitted before
# the client is told 200.
WAVE = 64
QUEUED_ITEMS = 256
# Of a long prompt, what is put into a message at once.
PIECE_TOKENS = 8192


def serve(
    generation: Generation, nodes: NodeTable, options: RouterOptions, usage: Usage
) -> AsyncGenerator[Item, None]:
    """``AdmittedItem``, then the deltas of all choices in any order, until all have finished.

    ``usage`` is filled on the way.
    """
    deadline = asyncio.get_running_loop().time() + options.request_timeout
    runs = [
        _serve_prompt(generation, number, Dispatcher(nodes, options, deadline), usage)
        for number in range(len(generation.prompts))
    ]
    return runs[0] if len(runs) == 1 else _merged(runs)


async def _serve_prompt(
    generation: Generation, number: int, dispatcher: Dispatcher, usage: Usage
) -> AsyncGenerator[Item, None]:
    """One prompt and its n choices, on one node at a time."""
    tokens = generation.prompts[number].tokens
    usage.prompt_tokens += len(tokens)
    attempt: NodeAttempt | None = None
    request = await _message(generation, number)
    async with aclosing(dispatcher.events(request, tokens, streamed=generation.stream)) as events:
        async for node, event in events:
            if attempt is None or attempt.node is not node:
                if attempt is not None:
                    yield Restarted(number)
                attempt = NodeAttempt(generation, number, node)
                usage.served[number] = attempt.served
            items = list(attempt.take(event))
            # At once: a client that is slow to read would keep the choice running.
            for index in attempt.cut_off():
                node.end_choice(request.call_id, index)
            for item in items:
                yield item
            if attempt.finished:
                # Leaving cancels the call: what a stop string ended must not go on on the node.
                attempt.account(usage)
                return
    raise NodeError("The node ended the request before it was finished.")


async def _merged(runs: list[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Items of all runs in the order in which they arrive, from ``WAVE`` runs at a time. The
    first failure ends all of them. Nothing is yielded before a whole wave is admitted."""
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(QUEUED_ITEMS)
    slots = asyncio.Semaphore(WAVE)
    tasks = [asyncio.create_task(_pump(run, slots, queue)) for run in runs]
    left, not_admitted = len(tasks), min(len(tasks), WAVE)
    early: list[Item] = []
    try:
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            elif isinstance(item, AdmittedItem):
                not_admitted -= 1
                if not_admitted == 0:
                    for held in (item, *early):
                        yield held
                    early.clear()
            elif not_admitted > 0:
                early.append(item)
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    run: AsyncGenerator[Item, None],
    slots: asyncio.Semaphore,
    queue: asyncio.Queue[Item | Exception | None],
) -> None:
    """Put the items of one run into ``queue``, then ``None``, or the exception that ended it."""
    try:
        async with slots, aclosing(run) as items:
            async for item in items:
                await queue.put(item)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)


async def _message(generation: Generation, number: int) -> pb.GenerateRequest:
    """The message for the node, without its deadline and its prefill candidates."""
    sampling = pb.Sampling()
    sampling.CopyFrom(generation.sampling)
    sampling.max_tokens = generation.max_tokens[number]
    sampling.min_tokens = generation.text.min_tokens
    if generation.logprobs is not None and not generation.text.discard_output:
        sampling.logprobs = generation.logprobs
    if generation.scored_prompt is not None:
        sampling.prompt_logprobs = generation.scored_prompt
    suffix = f"-{number}" if len(generation.prompts) > 1 else ""
    message = pb.GenerateRequest(
        request_id=generation.request_id + suffix,
        call_id=secrets.randbits(64),
        sampling=sampling,
        priority=generation.priority,
        cache_salt=generation.cache_salt,
        split_prompt_logprobs=True,
    )
    tokens, slices = memoryview(generation.prompts[number].tokens), Slices()
    for start in range(0, len(tokens), PIECE_TOKENS):
        message.prompt.extend(tokens[start : start + PIECE_TOKENS])
        await slices.rest()
    return message
