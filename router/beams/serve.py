"""Serve a prompt by beam search: each step sends one request per beam, for one token.

Nodes need no support for it. The prompt of a step is the prompt with the beam's tokens; all its
blocks but the last are in the prefix index of the node of the step before, so placement picks that
node again. A step that fails moves to another node like any request.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ...proto import tandem_pb2 as pb
from ..choice import ChoiceStream
from ..cluster.node import Node
from ..dispatch import Dispatcher
from ..echo import Echo
from ..errors import NodeError
from ..generation import (
    BeamOptions,
    ChoiceDelta,
    GenerationRequest,
    Output,
    RequestAdmitted,
    generate_message,
    new_tokens,
)
from ..node_streams.logprobs import check_logprobs
from ..usage import ServedPrompt, Usage
from .search import Beam, BeamSearch

NewDispatcher = Callable[[], Dispatcher]


@dataclass(frozen=True, slots=True)
class _Step:
    """The result of one beam's step: its continuations, with the node and its usage."""

    node: Node
    usage: pb.Usage
    logprobs: pb.PositionLogprobs


async def serve_beams(
    request: GenerationRequest,
    number: int,
    new_dispatcher: NewDispatcher,
    usage: Usage,
) -> AsyncGenerator[Sequence[Output], None]:
    """Serve one prompt. All output comes at the end, since the best beam may change until then."""
    assert request.beams is not None
    steps = _Steps(request, number, request.beams, new_dispatcher)
    search = BeamSearch(
        request.beams,
        min_tokens=request.text.min_tokens,
        max_tokens=request.max_tokens[number],
        num_top=request.logprobs,
    )
    first = True
    while not search.done:
        results = await steps.run(search.running)
        if first:
            first = False
            served = ServedPrompt(number, [results[0].node.node_id], results[0].usage)
            usage.prompt_tokens += len(request.prompts[number].tokens)
            usage.add(served)
            usage.served.append(served)
            yield [RequestAdmitted()]
        search.advance([result.logprobs for result in results])
    echo = Echo(request, number) if request.text.echo else None
    for index, beam in enumerate(search.best(request.n)):
        choice = ChoiceStream(request, number * request.n + index, len(echo.text) if echo else 0)
        if echo:
            yield list(echo.deltas(choice.index))
        yield list(_deltas(choice, beam, ended=search.is_end(beam)))
        usage.completion_tokens += choice.tokens
        usage.reasoning_tokens += choice.reasoning_tokens


class _Steps:
    """The requests of one search."""

    def __init__(
        self,
        request: GenerationRequest,
        number: int,
        beams: BeamOptions,
        new_dispatcher: NewDispatcher,
    ) -> None:
        self._prompt = request.prompts[number].tokens
        self._message = generate_message(request, number)
        # The tokens of each running beam; collecting them from its chain would be slow.
        self._tokens: dict[Beam, array[int]] = {}
        self._new_dispatcher = new_dispatcher
        num_top = max(beams.alternatives, request.logprobs or 0)
        self._message.sampling.CopyFrom(
            pb.Sampling(
                max_tokens=1,
                n=1,
                top_p=1.0,
                repetition_penalty=1.0,
                ignore_eos=True,
                logprobs=min(num_top, request.model.vocab_size),
            )
        )

    async def run(self, beams: list[Beam]) -> list[_Step]:
        """One step of all beams. The first failure ends all requests."""
        self._tokens = {beam: self._extended(beam) for beam in beams}
        tasks = [asyncio.create_task(self._extend(beam)) for beam in beams]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _extended(self, beam: Beam) -> array[int]:
        if beam.parent is None:
            return new_tokens()
        return self._tokens[beam.parent] + new_tokens((beam.token,))

    async def _extend(self, beam: Beam) -> _Step:
        message = pb.GenerateRequest()
        message.CopyFrom(self._message)
        tokens: array[int] = self._prompt
        if output := self._tokens[beam]:
            message.prompt.extend(output)
            tokens = self._prompt + output
        usage = pb.Usage()
        events = self._new_dispatcher().events(message, tokens)
        async with aclosing(events):
            async for node, node_events in events:
                # Tokens with logprobs are never plain.
                for event in (each for each in node_events if isinstance(each, pb.GenerateEvent)):
                    if event.HasField("usage"):
                        usage = event.usage
                    elif event.tokens.logprobs:
                        check_logprobs(event.tokens.logprobs)
                        return _Step(node, usage, event.tokens.logprobs[0])
        raise NodeError("The node ended a step of the beam search without a token.")


def _deltas(choice: ChoiceStream, beam: Beam, *, ended: bool) -> Iterator[ChoiceDelta]:
    """The output of a choice whose text is the beam's. ``ended``: by an end token."""
    chain = beam.chain()
    tokens = [each.token for each in chain]
    scored = [each.logprobs for each in chain if each.logprobs is not None]
    finished = pb.Finished(reason=pb.FINISH_REASON_LENGTH)
    if ended:
        finished = pb.Finished(reason=pb.FINISH_REASON_STOP, stop_token=tokens.pop())
        if scored:
            finished.stop_logprobs.CopyFrom(scored.pop())
    yield from choice.push(tokens, scored)
    yield from choice.finish(finished)
