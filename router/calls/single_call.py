"""A request on a decode node by an RPC of its own, for nodes without ``Decode.Stream``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from ...shared.errors import NODE_DRAINING
from .node_events import CallFailedError, NodeEvent

# Marks the end of a stream in ``read``; grpc's stubs do not declare it.
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class SingleCall:
    """See ``GenerateCall``."""

    def __init__(self, rpc: Any, *, reuses: bool) -> None:
        self.reuses = reuses
        self._rpc = rpc

    async def read(self) -> Sequence[NodeEvent]:
        try:
            event = await self._rpc.read()
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            # Otherwise a node's own status looks like that of a connection that has broken.
            answered = details.startswith(NODE_DRAINING)
            raise CallFailedError(error.code(), details, answered=answered) from error
        except asyncio.CancelledError:
            # Of the call, or else of the task that reads it.
            if self._rpc.cancelled() and not _cancelling():
                raise CallFailedError(grpc.StatusCode.CANCELLED, "cancelled") from None
            raise
        return () if event is EOF else (event,)

    def cancel(self) -> None:
        self._rpc.cancel()


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
