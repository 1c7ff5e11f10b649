"""A limit on how fast a server's messages are read, since each costs time of the router."""

from __future__ import annotations

import asyncio

BYTES_PER_SECOND = 8 << 20
# A small message costs as much as one of this size.
LEAST = 4096
# As much may come at once.
BURST = 4 << 20


class Pacer:
    """Delays the reader of a server that sends too much."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def pace(self, size: int) -> None:
        """Wait until the message of so many bytes may be read."""
        now = asyncio.get_running_loop().time()
        spent = max(size, LEAST) / BYTES_PER_SECOND
        self._free_at = max(self._free_at, now - BURST / BYTES_PER_SECOND) + spent
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)
