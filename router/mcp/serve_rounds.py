"""Serve a request in rounds, within the limits of any request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

from ..generation import GenerationRequest, Outputs
from ..http.access_log import AccessRecord
from ..http.memory_budget import MemoryBudget
from ..http.parsing import ParserPools

# About as many as a prompt has, to choose the threads that parse it.
CHARACTERS_OF_TOKEN = 4


async def serve_rounds(
    request: GenerationRequest,
    access: AccessRecord,
    generate: Callable[[GenerationRequest], Outputs],
    parsers: ParserPools,
    budget: MemoryBudget,
) -> Outputs:
    """The outputs of all rounds; the prompt of each is counted in ``access`` and ``budget``."""
    assert request.rounds is not None
    if request.rounds.approved:
        access.prompt_tokens = 0  # the first prompt is parsed again, with the results of calls
    with budget.share() as prompts:

        async def parse(work: Callable[[], GenerationRequest]) -> GenerationRequest:
            size = CHARACTERS_OF_TOKEN * request.prompt_tokens
            parsed = await parsers.run(("rounds", access.key), size, work)
            prompts.take(parsed.prompt_tokens)
            access.prompt_tokens += parsed.prompt_tokens
            return parsed

        async with aclosing(request.rounds.outputs(request, generate, parse)) as outputs:
            async for arrived in outputs:
                yield arrived
