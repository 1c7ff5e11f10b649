"""Streams that run during a measurement."""

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
    """Responses that are being streamed. ``remedy`` is for the error if one ends too early."""

    remedy: str
    responses: list[MeasuredResponse] = field(default_factory=list)

    def check(self) -> None:
        """Raise ``BenchmarkError`` if one has ended."""
        for one in self.responses:
            if one.finished or one.error:
                reason = one.error or f"after {len(one.times)} tokens; {self.remedy}"
                raise BenchmarkError(f"a victim's stream ended within the round: {reason}")

    async def until(self, condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Wait for a condition while the streams run. Raises ``BenchmarkError`` if a stream ends,
        or after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise BenchmarkError(f"a victim got too few tokens within {seconds:g} s")
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    server: ApiServer, bodies: Sequence[bytes], *, warm_tokens: int, remedy: str
) -> AsyncIterator[RunningStreams]:
    """Start streams, and wait until each has ``warm_tokens``; they are cancelled after the block.

    Each starts after the previous one is warm, so that a router knows the load of each replica."""
    streams = RunningStreams(remedy)
    tasks: list[asyncio.Task[MeasuredResponse]] = []
    try:
        for body in bodies:
            response = MeasuredResponse()
            streams.responses.append(response)
            tasks.append(asyncio.create_task(server.ask(body, response)))
            await streams.until(lambda one=response: len(one.times) >= warm_tokens)  # type: ignore[misc]
        yield streams
        streams.check()
    except BenchmarkError:
        streams.check()  # a stream that has ended may be the cause of the failure
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def greedy_body(server: ApiServer, prompt: Prompt, max_tokens: int) -> bytes:
    """A request of full length. It asks for token ids, so that tokens without text are counted
    too, if the server supports that."""
    return server.body(prompt, max_tokens, temperature=0, ignore_eos=True, return_token_ids=True)
