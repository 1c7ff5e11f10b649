"""Pings that keep a stream alive while nothing is generated, such as during a long prefill."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from .exchange import ClientGoneError, HttpExchange

# Anthropic's interval; proxies close connections after 30 to 60 s of silence.
PING_SECONDS = 15.0


@contextlib.asynccontextmanager
async def keep_alive(exchange: HttpExchange, ping: bytes) -> AsyncIterator[None]:
    """Write the event ``ping`` while nothing else is written. No-op if it is empty."""
    if not ping:
        yield
        return
    task = asyncio.create_task(_ping(exchange, ping))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _ping(exchange: HttpExchange, event: bytes) -> None:
    with contextlib.suppress(ClientGoneError):  # the writer of the stream gets it too
        while True:
            writes = exchange.writes
            await asyncio.sleep(PING_SECONDS)
            if exchange.streaming and not exchange.writing and exchange.writes == writes:
                await exchange.write(event)
