"""Streams that run while something else is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ..shared.errors import BenchmarkError
from .client.api_server import ApiServer, Prompt
from .client.measured_response import MeasuredResponse

START_SECONDS = 120.0


@dataclass(slots=True)
class RunningStreams:
    """Their answers, which grow. ``remedy`` is told where one ends too early."""

    remedy: str
    answers: list[MeasuredResponse] = field(default_factory=list)

    def check(self) -> None:
        """Raise ``BenchmarkError`` if one has ended."""
        for one in self.answers:
            if one.finished or one.error:
                reason = one.error or f"after {len(one.times)} tokens; {self.remedy}"
                raise BenchmarkError(f"a victim's stream ended within the round: {reason}")

    async def until(self, holds: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Wait for something while they run. Raises ``BenchmarkError`` after so many seconds."""
        deadline = time.monotonic() + seconds
        while not holds():
            self.check()
            if time.monotonic() > deadline:
                raise BenchmarkError(f"a victim got too few tokens within {seconds:g} s")
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    server: ApiServer, bodies: Sequence[bytes], *, warm_tokens: int, remedy: str
) -> AsyncIterator[RunningStreams]:
    """Streams that have so many tokens, and are cut at the end. One begins after the other, so
    that a router sees how busy each replica is."""
    streams = RunningStreams(remedy)
    tasks: list[asyncio.Task[MeasuredResponse]] = []
    try:
        for body in bodies:
            answer = MeasuredResponse()
            streams.answers.append(answer)
            tasks.append(asyncio.create_task(server.ask(body, answer)))
            await streams.until(lambda one=answer: len(one.times) >= warm_tokens)  # type: ignore[misc]
        yield streams
        streams.check()
    except BenchmarkError:
        streams.check()  # a stream that has ended is the cause of whatever else failed
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def greedy_body(server: ApiServer, prompt: Prompt, max_tokens: int) -> bytes:
    """A request of full length; with ids where the server knows that field, so that tokens without
    text are counted too."""
    return server.body(prompt, max_tokens, temperature=0, ignore_eos=True, return_token_ids=True)
