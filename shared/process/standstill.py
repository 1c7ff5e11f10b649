"""Timeouts that allow for a standstill of this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

# A timeout noticed this late means that the process stood still: its machine was paused, or it got
# no CPU.
STILL_SECONDS = 0.5


async def within(
    seconds: float,
    wait: Callable[[], Awaitable[T]],
    *,
    afterwards: float,
    unless: Callable[[], bool] = lambda: False,
) -> T:
    """Await ``wait()`` for at most ``seconds``. Raises ``TimeoutError``.

    After a standstill, messages that others sent in the meantime are still unread. So it then waits
    for another ``afterwards`` seconds, unless ``unless()`` is true.
    """
    due = time.monotonic() + seconds
    # Not wait_for: before Python 3.12 it may swallow a cancellation.
    try:
        async with asyncio.timeout(seconds):
            return await wait()
    except TimeoutError:
        if time.monotonic() - due <= STILL_SECONDS or unless():
            raise
    async with asyncio.timeout(afterwards):
        return await wait()
