"""A server that runs elsewhere, by streamable HTTP, with limits on what it sends. Needs the package
``mcp``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
from mcp.client.streamable_http import streamable_http_client

from .message_bounds import bounded
from .server_config import McpServerConfig

# A stream of events may have several messages.
STREAM_MESSAGES = 16


class _Bounded(httpx2.AsyncByteStream):
    """The body of a response; one that is too long fails."""

    def __init__(self, body: Any, most: int) -> None:
        self._body = body
        self._most = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._body:
            size += len(part)
            if size > self._most:
                raise httpx2.ReadError(f"the response has more than {self._most} bytes")
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        # Compressed bodies could grow beyond any limit.
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.ReadError("the response is compressed, although it must not be")
        most = self._most * (STREAM_MESSAGES if events else 1)
        response.stream = _Bounded(response.stream, most)
        return response


@asynccontextmanager
async def http_transport(
    config: McpServerConfig, most: int, seconds: float
) -> AsyncIterator[tuple[Any, Any]]:
    """Messages to and from the server of a URL, of at most ``most`` bytes each."""
    headers = {"accept-encoding": "identity"} | dict(config.headers)
    client = httpx2.AsyncClient(
        headers=headers,
        timeout=httpx2.Timeout(seconds),
        transport=_BoundedTransport(most),
        trust_env=False,
    )
    async with (
        client,
        streamable_http_client(config.url, http_client=client, max_sse_event_size=most) as streams,
        _bounded_messages(streams[0]) as incoming,
    ):
        yield incoming, streams[1]


@asynccontextmanager
async def _bounded_messages(received: Any) -> AsyncIterator[Any]:
    """The messages of a stream, as far as they are cheap to check."""
    passed, incoming = anyio.create_memory_object_stream[Any](0)

    async def pass_on() -> None:
        with passed, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for item in received:
                if isinstance(item, Exception) or bounded(item.message):
                    await passed.send(item)

    passing = asyncio.create_task(pass_on())
    try:
        yield incoming
    finally:
        incoming.close()
        received.close()
        passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)
