"""Processes that ended while they computed one prompt, which may be the reason."""

from __future__ import annotations

import asyncio

from ..proto import tandem_pb2 as pb
from ..shared.errors import TandemError

# On prefill and decode nodes together; routers use the same limit.
MAX_DEATHS = 2


class GivenUpError(TandemError):
    """No node may compute the prompt again."""


class PromptDeaths:
    """The deaths of one request: those that the router has counted, and those that happen here.

    ``events`` holds a message to the router for each, sent at once, because this node may be the
    next to die; ``None`` follows the last one. It is bounded by ``MAX_DEATHS``.
    """

    def __init__(self, before: int = 0) -> None:
        self._count = before
        self.events: asyncio.Queue[pb.GenerateEvent | None] = asyncio.Queue()

    def add(self, node_id: str) -> None:
        """Raises ``GivenUpError`` at the limit."""
        self._count += 1
        self.events.put_nowait(pb.GenerateEvent(prefill_died=pb.PrefillDied(node_id=node_id)))
        if self._count >= MAX_DEATHS:
            raise GivenUpError(
                f"{self._count} processes ended while they computed this prompt, {node_id} last; "
                f"it is not tried again"
            )

    def close(self) -> None:
        """The prompt is computed, or never will be."""
        self.events.put_nowait(None)
