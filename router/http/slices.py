"""Cooperative yielding: long work on the event loop, cut into slices."""

from __future__ import annotations

import asyncio
import time

# Work of this length does not make a stream stutter.
SLICE_SECONDS = 0.005


class TimeSlices:
    """One task's slices. Call ``checkpoint`` between pieces of work."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def checkpoint(self) -> None:
        """Let other tasks run if the current slice is over."""
        if time.monotonic() - self._since > SLICE_SECONDS:
            await asyncio.sleep(0)
            self._since = time.monotonic()
