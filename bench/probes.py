"""Short requests beside the load, which show how long others wait meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from .client.api_server import ApiServer
from .client.measured_response import MeasuredResponse
from .open_loop import WallClock
from .report.figures import median, percentile

PROMPT, TOKENS = "Hi", 1


@asynccontextmanager
async def probing(server: ApiServer, rate: float) -> AsyncIterator[list[MeasuredResponse]]:
    """Send a probe every 1/``rate`` seconds, whether or not the last one was answered; gives their
    answers, which are complete behind the block. None without a rate."""
    answers: list[MeasuredResponse] = []
    if not rate:
        yield answers
        return
    async with asyncio.TaskGroup() as group:

        async def probe() -> None:
            clock, body = WallClock(), server.body(PROMPT, TOKENS)
            begin = clock.now()
            while True:
                await clock.sleep_until(begin + len(answers) / rate)
                answers.append(MeasuredResponse())
                group.create_task(server.ask(body, answers[-1]))

        sending = group.create_task(probe())
        yield answers
        sending.cancel()


def probe_result(answers: Sequence[MeasuredResponse]) -> dict[str, float]:
    """The figures of probes under vLLM's names; none if no probe was answered."""
    times = [1000 * answer.latency for answer in answers if answer.success]
    if not times:
        return {}
    return {
        "probe_completed": len(times),
        "probe_failed": len(answers) - len(times),
        "probe_median_e2el_ms": median(times),
        "probe_p99_e2el_ms": percentile(times, 99),
        "probe_max_e2el_ms": max(times),
    }
