"""Short requests beside the load, which measure the delays of other users."""

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
    """Send a probe every 1/``rate`` seconds during the block, even if the last one is still
    running. Yields the responses, which are complete after the block; none if ``rate`` is 0."""
    responses: list[MeasuredResponse] = []
    if not rate:
        yield responses
        return
    async with asyncio.TaskGroup() as group:

        async def probe() -> None:
            clock, body = WallClock(), server.body(PROMPT, TOKENS)
            begin = clock.now()
            while True:
                await clock.sleep_until(begin + len(responses) / rate)
                responses.append(MeasuredResponse())
                group.create_task(server.ask(body, responses[-1]))

        sending = group.create_task(probe())
        yield responses
        sending.cancel()


def probe_result(responses: Sequence[MeasuredResponse]) -> dict[str, float]:
    """The figures of probes; empty if none was successful."""
    times = [1000 * response.latency for response in responses if response.success]
    if not times:
        return {}
    return {
        "probe_completed": len(times),
        "probe_failed": len(responses) - len(times),
        "probe_median_e2el_ms": median(times),
        "probe_p99_e2el_ms": percentile(times, 99),
        "probe_max_e2el_ms": max(times),
    }
