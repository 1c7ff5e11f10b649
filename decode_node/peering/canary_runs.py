"""Canaries of greeted peers: one for each pair of epochs, shared by the requests that wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ...shared.causes import Cause
from ...shared.errors import PeerRefusedError, TransferError
from ...shared.node.metrics import FAILED, MISMATCH, PASSED, NodeMetrics
from .peer import Peer
from .refused_peers import RefusedPeers

log = logging.getLogger("tandem.decode")

# Time after the start of a canary that requests wait for it.
WAIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _CanaryRun:
    """A canary under way, or its result."""

    task: asyncio.Task[TransferError | None]
    start: float = field(default_factory=time.monotonic)


class CanaryRuns:
    """Runs ``check`` once for each start of a peer's process.

    ``check`` raises ``PeerRefusedError`` if the peer computes different KV than this node, and
    ``TransferError`` if the two could not be compared.
    """

    def __init__(
        self,
        check: Callable[[Peer], Awaitable[object]],
        refused: RefusedPeers,
        metrics: NodeMetrics,
        max_peers: int,
    ) -> None:
        self._check = check
        self._refused = refused
        self._metrics = metrics
        self._max_peers = max_peers
        self._runs: dict[Peer, _CanaryRun] = {}
        self._passed: dict[str, int] = {}  # epochs by node

    async def result(self, peer: Peer) -> TransferError | None:
        """Wait for the peer's canary; returns ``None`` if it passed.

        Raises ``TransferError`` if it takes longer than ``WAIT_SECONDS``.
        """
        run = self._runs.get(peer)
        if run is None:
            run = self._runs[peer] = _CanaryRun(asyncio.create_task(self._run(peer)))
        remaining = run.start + WAIT_SECONDS - time.monotonic()
        await asyncio.wait([run.task], timeout=max(0.0, remaining))
        if not run.task.done():
            reason = f"{peer.address}: its canary is still under way"
            raise TransferError(reason, cause=Cause.CANARY)
        if run.task.cancelled():
            raise TransferError("the node is shutting down", cause=Cause.STOPPING)
        return run.task.result()

    def forget(self, peer: Peer) -> None:
        """Drop a peer's run once it has ended; the next greeting starts another one."""
        run = self._runs.get(peer)
        if run is not None:
            run.task.add_done_callback(lambda _: self._runs.pop(peer, None))

    async def close(self) -> None:
        tasks = [run.task for run in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, peer: Peer) -> TransferError | None:
        """Run the canary unless it has passed before; returns the error if it fails."""
        if self._passed.get(peer.node_id) == peer.epoch:
            return None
        start = time.monotonic()
        try:
            await self._check(peer)
        except TransferError as error:
            outcome = FAILED
            if isinstance(error, PeerRefusedError):
                outcome = MISMATCH
                self._refused.add(peer.address, peer.node_id, peer.epoch, error)
            log.warning("the canary of %s: %s", peer.address, error)
            self._metrics.canaries.labels(outcome).inc()
            return error
        log.info("the canary of %s passed in %.3f s", peer.address, time.monotonic() - start)
        self._metrics.canaries.labels(PASSED).inc()
        if len(self._passed) >= self._max_peers:
            del self._passed[next(iter(self._passed))]
        self._passed[peer.node_id] = peer.epoch
        return None
