"""Serve a prompt by beam search: each step is a request for each beam, which draws one token.

Nodes need nothing for it: prompt and beam are a prompt whose blocks, but for the last, are in the
prefix index of the node that served the step before, where placement sends it. A step that fails
moves to another node like any request.
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
from ..generate_message import generate_message
from ..generation import (
    BeamOptions,
    ChoiceDelta,
    GenerationRequest,
    Output,
    RequestAdmitted,
    new_tokens,
)
from ..node_streams.logprobs import check_logprobs
from ..usage import ServedPrompt, Usage
from .search import Beam, BeamSearch

NewDispatcher = Callable[[], Dispatcher]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The step of one beam: its continuations, and the node's account."""

    node: Node
    usage: pb.Usage
    logprobs: pb.PositionLogprobs


async def serve_beams(
    request: GenerationRequest,
    number: int,
    new_dispatcher: NewDispatcher,
    usage: Usage,
) -> AsyncGenerator[Sequence[Output], None]:
    """Search the continuations of one prompt. The result comes at the end, since the best beam may
    change until then."""
    assert request.beams is not None
    steps = _Steps(request, number, request.beams, new_dispatcher)
    search = BeamSearch(
        request.beams,
        min_tokens=request.text.min_tokens,
        max_tokens=request.max_tokens[number],
        listed=request.logprobs,
    )
    first = True
    while not search.done:
        drawn = await steps.draw(search.running)
        if first:
            first = False
            served = ServedPrompt(number, [drawn[0].node.node_id], drawn[0].usage)
            usage.prompt_tokens += len(request.prompts[number].tokens)
            usage.add(served)
            usage.served.append(served)
            yield [RequestAdmitted()]
        search.advance([step.logprobs for step in drawn])
    echo = Echo(request, number) if request.text.echo else None
    for index, beam in enumerate(search.best(request.n)):
        choice = ChoiceStream(request, number * request.n + index, len(echo.text) if echo else 0)
        if echo:
            yield list(echo.deltas(choice.index))
        yield list(_told(choice, beam, ended=search.is_end(beam)))
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
        # What is behind the prompt, of each running beam: to follow its chain takes long.
        self._behind: dict[Beam, array[int]] = {}
        self._new_dispatcher = new_dispatcher
        listed = max(beams.alternatives, request.logprobs or 0)
        self._message.sampling.CopyFrom(
            pb.Sampling(
                max_tokens=1,
                n=1,
                top_p=1.0,
                repetition_penalty=1.0,
                ignore_eos=True,
                logprobs=min(listed, request.model.vocab_size),
            )
        )

    async def draw(self, beams: list[Beam]) -> list[_Drawn]:
        """One step of all beams. The first failure ends all requests."""
        self._behind = {beam: self._tokens(beam) for beam in beams}
        tasks = [asyncio.create_task(self._extend(beam)) for beam in beams]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _tokens(self, beam: Beam) -> array[int]:
        if beam.parent is None:
            return new_tokens()
        return self._behind[beam.parent] + new_tokens((beam.token,))

    async def _extend(self, beam: Beam) -> _Drawn:
        message = pb.GenerateRequest()
        message.CopyFrom(self._message)
        tokens: array[int] = self._prompt
        if behind := self._behind[beam]:
            message.prompt.extend(behind)
            tokens = self._prompt + behind
        computed = pb.Usage()
        events = self._new_dispatcher().events(message, tokens)
        async with aclosing(events):
            async for node, arrived in events:
                # Tokens with logprobs are never plain.
                for event in (each for each in arrived if isinstance(each, pb.GenerateEvent)):
                    if event.HasField("usage"):
                        computed = event.usage
                    elif event.tokens.logprobs:
                        check_logprobs(event.tokens.logprobs)
                        return _Drawn(node, computed, event.tokens.logprobs[0])
        raise NodeError("The node ended a step of the beam search without a token.")


def _told(choice: ChoiceStream, beam: Beam, *, ended: bool) -> Iterator[ChoiceDelta]:
    """A beam as the output of a choice."""
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
