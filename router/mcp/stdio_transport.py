"""A server that the router starts; messages are lines on its standard input and output.

The SDK's own transport does not limit the length of a line, so a hostile server could exhaust the
memory. Needs the package ``mcp``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types
import pydantic
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from .message_bounds import bounded
from .server_config import McpServerConfig

# Time for a server to exit after its input ends, and after SIGTERM.
END_SECONDS = 1.0

Streams = tuple[Any, Any]


@asynccontextmanager
async def stdio_transport(config: McpServerConfig, max_bytes: int) -> AsyncIterator[Streams]:
    """Start the server, and stop it at the end of the block. A message of more than ``max_bytes``
    bytes ends the connection."""
    process = await asyncio.create_subprocess_exec(
        config.command,
        *config.args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=get_default_environment() | dict(config.env),
        cwd=config.cwd,
        limit=max_bytes,
        start_new_session=True,
    )
    to_client, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, from_client = anyio.create_memory_object_stream[Any](0)
    tasks = [
        asyncio.create_task(_read(process, to_client)),
        asyncio.create_task(_write(process, from_client)),
    ]
    try:
        yield incoming, outgoing
    finally:
        for task in tasks:
            task.cancel()
        for stream in (incoming, outgoing, to_client, from_client):
            stream.close()
        try:
            await asyncio.shield(_end(process))
        except asyncio.CancelledError:
            _signal(process, signal.SIGTERM)  # the loop may stop before it has ended
            raise
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(process: asyncio.subprocess.Process, messages: Any) -> None:
    """Read messages until the output ends or a line is too long. Invalid messages are skipped."""
    assert process.stdout is not None
    with messages, contextlib.suppress(ValueError, anyio.BrokenResourceError):
        while line := await process.stdout.readline():
            with contextlib.suppress(pydantic.ValidationError):
                message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                if bounded(message):
                    await messages.send(SessionMessage(message))


async def _write(process: asyncio.subprocess.Process, messages: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        async for message in messages:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the input, then stop the server with all its children."""
    assert process.stdin is not None
    process.stdin.close()
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            _signal(process, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
            break
    _signal(process, signal.SIGKILL)  # children that outlived it


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signal the server and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
