"""Waits for others that allow for a standstill of this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

# A timeout that is noticed so late shows that this process stood still: its machine was paused, or
# it got no CPU.
STILL_SECONDS = 0.5


async def within(
    seconds: float,
    wait: Callable[[], Awaitable[T]],
    *,
    afterwards: float,
    unless: Callable[[], bool] = lambda: False,
) -> T:
    """Await ``wait()`` for that long. Raises ``TimeoutError``.

    What others sent during a standstill is unread when it ends, and no sign of silence: the wait
    then goes on for ``afterwards`` seconds, unless ``unless()``.
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
