"""Tasks that run as long as their process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def first_end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait until one of the tasks ends by itself; raise its error."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
