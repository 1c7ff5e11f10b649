"""Scripts of fake nodes that refuse, hang or fall silent."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from tandem.tests.router.support import admitted, tokens_event

PATHS = ("/v1/chat/completions", "/v1/completions")


def refuse(code: grpc.StatusCode, details: str) -> Any:
    async def script(request: Any, context: Any) -> Any:
        await context.abort(code, details)
        yield

    return script


async def hang(request: Any, context: Any) -> Any:
    """A node that never responds."""
    await asyncio.sleep(60)
    yield


async def stuck(request: Any, context: Any) -> Any:
    """A node that sends one token, then nothing."""
    yield admitted()
    yield tokens_event(0, [5])
    await asyncio.sleep(60)


async def silent(request: Any, context: Any) -> Any:
    """A node that admits the request, then sends nothing."""
    yield admitted()
    await asyncio.sleep(60)
