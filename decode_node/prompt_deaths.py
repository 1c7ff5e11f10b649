"""Processes that died while computing one prompt, which may be the reason."""

from __future__ import annotations

import asyncio

from ..proto import tandem_pb2 as pb
from ..shared.errors import TandemError

# Deaths on prefill and decode nodes together; routers use the same limit.
MAX_DEATHS = 2


class GivenUpError(TandemError):
    """No node may compute the prompt again."""


class PromptDeaths:
    """Deaths caused by one request, including ``before``, which the router has counted.

    Each new one is reported to the router at once through ``events``, because this node may be the
    next to die; ``None`` follows the last. The queue is bounded by ``MAX_DEATHS``.
    """

    def __init__(self, before: int = 0) -> None:
        self._count = before
        self.events: asyncio.Queue[pb.GenerateEvent | None] = asyncio.Queue()

    def add(self, node_id: str) -> None:
        """Count a death. Raises ``GivenUpError`` at the limit."""
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
