"""Write the outputs of a request as a stream, or collect them for a unary response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .generation import ChoiceDelta, Output, Outputs
from .http.exchange import HttpExchange
from .surface import ResponseFormatter
from .telemetry.request_metrics import RequestMetrics

# Outputs to process before other tasks run: an echoed prompt, or many choices, may bring thousands
# at once, each with many logprobs.
AT_ONCE = 64


async def stream_outputs(
    exchange: HttpExchange, outputs: Outputs, metrics: RequestMetrics, formatter: ResponseFormatter
) -> None:
    """Write outputs as they arrive. The HTTP status is sent with the first output, when a node has
    admitted the request, so that errors before can still have a status of their own."""
    async for batch in outputs:
        if not exchange.started:
            await exchange.start_stream()
            await exchange.write(formatter.opening())
        for start in range(0, len(batch), AT_ONCE):
            if start:
                await asyncio.sleep(0)
            part = batch[start : start + AT_ONCE]
            for output in part:
                metrics.count(output)
            deltas = [output for output in part if isinstance(output, ChoiceDelta)]
            await exchange.write(b"".join([formatter.chunk(delta) for delta in deltas]))
    metrics.finish(exchange.access.usage)
    closing = formatter.closing(exchange.access.usage)
    await formatter.store()
    await exchange.write(closing)
    await exchange.end_stream(formatter.end_of_stream())


async def collect_outputs(
    outputs: Outputs, metrics: RequestMetrics, add: Callable[[Output], None]
) -> None:
    """Collect all outputs."""
    async for batch in outputs:
        for number, output in enumerate(batch, 1):
            metrics.count(output)
            add(output)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
