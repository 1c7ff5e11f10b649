"""Long work on the event loop, cut so that everybody else's work goes on meanwhile."""

from __future__ import annotations

import asyncio
import time

# Work of this length makes no stream stutter.
SLICE_SECONDS = 0.005


class Slices:
    """One task's: ``rest`` between its pieces of work lets other tasks run once a slice is over."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def rest(self) -> None:
        if time.monotonic() - self._since > SLICE_SECONDS:
            await asyncio.sleep(0)
            self._since = time.monotonic()
