"""Processes that ended while they computed one prompt, which may be what ends them."""

from __future__ import annotations

import asyncio

from ..proto import tandem_pb2 as pb
from ..shared.errors import TandemError

# On prefill and decode nodes together; routers count by the same number.
MAX_DEATHS = 2


class GivenUpError(TandemError):
    """The prompt must not be computed anywhere any more."""


class PromptDeaths:
    """Of one request: those that the router knows of, and those that happen here.

    ``news`` has an event for the router of each, as soon as it is known, since this node may be the
    next; ``None`` follows the last one.
    """

    def __init__(self, before: int = 0) -> None:
        self._count = before
        self.news: asyncio.Queue[pb.GenerateEvent | None] = asyncio.Queue()

    def add(self, node_id: str) -> None:
        """Raises ``GivenUpError`` when it was one too many."""
        self._count += 1
        self.news.put_nowait(pb.GenerateEvent(prefill_died=pb.PrefillDied(node_id=node_id)))
        if self._count >= MAX_DEATHS:
            raise GivenUpError(
                f"{self._count} processes ended while they computed this prompt, {node_id} last; "
                f"it is given up"
            )

    def over(self) -> None:
        """The prompt is computed, or never will be."""
        self.news.put_nowait(None)
