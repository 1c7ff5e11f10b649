"""Outputs of a request written as a stream, or collected for a response that is sent whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .generation import ChoiceDelta, Output, Outputs
from .http.exchange import HttpExchange
from .surface import ResponseFormatter
from .telemetry.request_metrics import RequestMetrics

# Outputs after which other tasks have their turn: an echoed prompt, or many choices, may bring
# thousands together, each with many logprobs.
AT_ONCE = 64


async def stream_outputs(
    exchange: HttpExchange, outputs: Outputs, metrics: RequestMetrics, formatter: ResponseFormatter
) -> None:
    """Write outputs as they arrive. The HTTP status waits for the first output, which comes once a
    node has admitted the request: until then an error can still have a status of its own."""
    async for arrived in outputs:
        if not exchange.started:
            await exchange.start_stream()
            await exchange.write(formatter.opening())
        for start in range(0, len(arrived), AT_ONCE):
            if start:
                await asyncio.sleep(0)
            some = arrived[start : start + AT_ONCE]
            for output in some:
                metrics.count(output)
            deltas = [output for output in some if isinstance(output, ChoiceDelta)]
            await exchange.write(b"".join([formatter.chunk(delta) for delta in deltas]))
    metrics.finish(exchange.access.usage)
    closing = formatter.closing(exchange.access.usage)
    await formatter.keep()
    await exchange.write(closing)
    await exchange.end_stream(formatter.end_of_stream())


async def collect_outputs(
    outputs: Outputs, metrics: RequestMetrics, add: Callable[[Output], None]
) -> None:
    """Collect all outputs."""
    async for arrived in outputs:
        for number, output in enumerate(arrived, 1):
            metrics.count(output)
            add(output)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
