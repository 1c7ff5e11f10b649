"""Waiting for asyncio's tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def first_end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait until one of the tasks ends by itself; raise its error."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Wait until ``work`` ends, even if the caller is cancelled; then re-raise the cancellation.

    Used to release blocks, which may be freed only when no rank accesses them. ``work`` must have
    its own deadline."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
