"""Serve one request: the router's whole work in one place.

    Generation -> a message a prompt -> a node -> its events -> choices -> deltas

Streamed and unary answers are both made from the items that ``serve`` yields, so they cannot
differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ..proto import tandem_pb2 as pb
from .choice import Choice
from .dispatch import dispatch
from .echo import Echo
from .errors import NodeError
from .generation import Admitted, Done, Generation, Item, PromptScored, Usage
from .nodes import Node, NodeTable
from .options import RouterOptions

# Prompts of one request that are on nodes at the same time; also how many must be admitted before
# the client is told 200.
WAVE = 64
QUEUED_ITEMS = 256


async def serve(
    generation: Generation, nodes: NodeTable, options: RouterOptions
) -> AsyncGenerator[Item, None]:
    """``Admitted``, then the deltas of all choices in any order, then ``Done``."""
    usage = Usage()
    runs = [
        _serve_prompt(generation, number, nodes, options, usage)
        for number in range(len(generation.prompts))
    ]
    waiting = min(len(runs), WAVE)
    held: list[Item] = []
    async with aclosing(runs[0] if len(runs) == 1 else _interleave(runs)) as items:
        async for item in items:
            if isinstance(item, Admitted):
                waiting -= 1
                if waiting == 0:
                    yield item
                    for early in held:
                        yield early
                    held.clear()
            elif waiting > 0:
                held.append(item)
            else:
                yield item
    yield Done(usage)


async def _serve_prompt(
    generation: Generation, number: int, nodes: NodeTable, options: RouterOptions, usage: Usage
) -> AsyncGenerator[Item, None]:
    """One prompt and its n choices, on one node at a time."""
    prompt = generation.prompts[number]
    first = number * generation.n
    echo = Echo(generation, number) if generation.text.echo else None
    choices = [
        Choice(generation, first + i, len(echo.text) if echo else 0) for i in range(generation.n)
    ]
    usage.prompt_tokens += len(prompt.tokens)
    told: tuple[Node, pb.Usage] | None = None
    request = _message(generation, number, options)
    async with aclosing(dispatch(request, nodes, options)) as events:
        async for node, event in events:
            choice, delta = None, None
            match event.WhichOneof("event"):
                case "admitted":
                    yield Admitted()
                case "usage":
                    told = node, event.usage
                case "prompt_logprobs":
                    positions = list(event.prompt_logprobs.positions)
                    if echo:
                        echo.positions = positions
                    yield PromptScored(number, positions)
                case "tokens":
                    choice = _choice(choices, event.tokens.index)
                    delta = choice.push(event.tokens.tokens, event.tokens.logprobs)
                case "finished":
                    choice = _choice(choices, event.finished.index)
                    delta = choice.finish(event.finished)
            if choice is None or delta is None:
                continue
            if echo and choice.index not in echo.shown:
                yield echo.delta(choice.index)
            yield delta
            if all(choice.finished for choice in choices):
                # Leaving cancels the call: what a stop string ended must not go on on the node.
                _account(usage, choices, told)
                return
    raise NodeError("The node ended the request before it was finished.")


async def _interleave(runs: list[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Items of all runs as they come, ``WAVE`` runs at a time. The first failure ends them all."""
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(QUEUED_ITEMS)
    slots = asyncio.Semaphore(WAVE)

    async def pump(run: AsyncGenerator[Item, None]) -> None:
        try:
            async with slots, aclosing(run) as items:
                async for item in items:
                    await queue.put(item)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(run)) for run in runs]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _message(generation: Generation, number: int, options: RouterOptions) -> pb.GenerateRequest:
    sampling = pb.Sampling()
    sampling.CopyFrom(generation.sampling)
    sampling.max_tokens = generation.max_tokens[number]
    sampling.min_tokens = generation.text.min_tokens
    if generation.logprobs is not None and not generation.text.discard_output:
        sampling.logprobs = generation.logprobs
    if generation.prompt_logprobs is not None:
        sampling.prompt_logprobs = generation.prompt_logprobs
    suffix = f"-{number}" if len(generation.prompts) > 1 else ""
    return pb.GenerateRequest(
        request_id=generation.request_id + suffix,
        prompt=generation.prompts[number].tokens,
        sampling=sampling,
        priority=generation.priority,
        cache_salt=generation.cache_salt,
        deadline_seconds=options.request_timeout,
    )


def _choice(choices: list[Choice], index: int) -> Choice:
    if index >= len(choices):
        raise NodeError("The node answered for a choice that was not asked for.")
    return choices[index]


def _account(usage: Usage, choices: list[Choice], told: tuple[Node, pb.Usage] | None) -> None:
    usage.completion_tokens += sum(choice.tokens for choice in choices)
    if told is None:
        return
    node, computed = told
    usage.cached_tokens += computed.cached_tokens
    usage.remote_tokens += computed.remote_tokens
    if node.node_id not in usage.decode_nodes:
        usage.decode_nodes.append(node.node_id)
    if computed.prefill_node and computed.prefill_node not in usage.prefill_nodes:
        usage.prefill_nodes.append(computed.prefill_node)
