"""Work that must reach its end before its caller goes on, whoever cancels the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Wait for ``work`` to end; only then pass on a cancellation that came meanwhile.

    For giving back blocks: they may be freed when no rank touches them any more, and not before.
    ``work`` must have a deadline of its own.
    """
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
