"""A remote server over streamable HTTP, with limits on what it sends. Needs the package ``mcp``."""

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

# An event stream may have the size of this many messages.
STREAM_MESSAGES = 16


class _BoundedBody(httpx2.AsyncByteStream):
    """The body of a response; reading fails beyond ``max_bytes``."""

    def __init__(self, body: Any, max_bytes: int) -> None:
        self._body = body
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._body:
            size += len(part)
            if size > self._max_bytes:
                raise httpx2.ReadError(f"the response has more than {self._max_bytes} bytes")
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        # A compressed body could expand beyond any limit.
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.ReadError("the response is compressed, although 'identity' was requested")
        max_bytes = self._max_bytes * (STREAM_MESSAGES if events else 1)
        response.stream = _BoundedBody(response.stream, max_bytes)
        return response


@asynccontextmanager
async def http_transport(
    config: McpServerConfig, max_bytes: int, seconds: float
) -> AsyncIterator[tuple[Any, Any]]:
    """Streams of messages to and from the server at a URL, at most ``max_bytes`` each."""
    headers = {"accept-encoding": "identity"} | dict(config.headers)
    client = httpx2.AsyncClient(
        headers=headers,
        timeout=httpx2.Timeout(seconds),
        transport=_BoundedTransport(max_bytes),
        trust_env=False,
    )
    async with (
        client,
        streamable_http_client(
            config.url, http_client=client, max_sse_event_size=max_bytes
        ) as streams,
        _bounded_messages(streams[0]) as incoming,
    ):
        yield incoming, streams[1]


@asynccontextmanager
async def _bounded_messages(messages: Any) -> AsyncIterator[Any]:
    """The messages of a stream, reduced to what is cheap to validate."""
    outgoing, incoming = anyio.create_memory_object_stream[Any](0)

    async def pass_on() -> None:
        with outgoing, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for item in messages:
                if isinstance(item, Exception) or bounded(item.message):
                    await outgoing.send(item)

    task = asyncio.create_task(pass_on())
    try:
        yield incoming
    finally:
        incoming.close()
        messages.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
