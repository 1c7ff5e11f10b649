"""Waits for states that no event announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    """Wait for a state that another task brings about; fail at the deadline."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 (no event announces it)
            await asyncio.sleep(0.005)
