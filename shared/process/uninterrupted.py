"""Cleanup that a cancellation of its caller must not interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Wait until ``work`` ends, then re-raise a cancellation that arrived meanwhile.

    Used for releasing blocks, which may be freed only when no rank accesses them. ``work`` must
    have its own deadline."""
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
