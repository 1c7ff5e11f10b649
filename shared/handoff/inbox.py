"""The head's view of its ranks' data planes: one waiting place for each (transfer, attempt)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from .messages import (
    CancelExpect,
    Cancelled,
    CancelSend,
    Command,
    Compared,
    PeerJoined,
    PeerLost,
    PlaneFailed,
    Received,
    ReceiveFailed,
    SendFailed,
    SendFinished,
    from_wire,
    to_wire,
)
from .stats import DataPlaneStats

log = logging.getLogger("tandem.handoff")

QUIET_SECONDS = 10.0

# After one of these a rank neither reads nor writes the attempt's blocks.
_LAST = (SendFinished, SendFailed, Received, ReceiveFailed, Compared, Cancelled)


class Attempt:
    """The news of one attempt: events from every rank of this node, and what the head adds.

    The queue is bounded by what can happen in one attempt: a few events a rank, one a step, and one
    a sign of life.
    """

    def __init__(self, transfer_id: int, attempt: int, ranks: int) -> None:
        self.transfer_id = transfer_id
        self.attempt = attempt
        self.ranks = ranks
        self.news: asyncio.Queue[object] = asyncio.Queue()
        self.silent: set[int] = set(range(ranks))  # ranks that hold nothing of it (any more)

    def engage(self, rank: int) -> None:
        """The rank was given blocks: they are busy until an event says otherwise."""
        self.silent.discard(rank)


class Inbox:
    """Sorts events to attempts, and proves that a cancelled attempt touches no block any more."""

    def __init__(
        self, send: Callable[[int, bytes], None], on_plane_failed: Callable[[str], None]
    ) -> None:
        self._send = send
        self._on_plane_failed = on_plane_failed
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self.stats: dict[int, DataPlaneStats] = {}  # what each rank last reported

    def open(self, transfer_id: int, attempt: int, ranks: int) -> Attempt:
        """Begin to collect events. Raises ``KeyError`` when the attempt is already open."""
        key = (transfer_id, attempt)
        if key in self._attempts:
            raise KeyError(f"transfer {transfer_id} attempt {attempt} is already open")
        self._attempts[key] = Attempt(transfer_id, attempt, ranks)
        return self._attempts[key]

    def command(self, attempt: Attempt, rank: int, command: Command) -> None:
        attempt.engage(rank)
        self._send(rank, to_wire(command))

    def on_event(self, rank: int, data: bytes) -> None:
        """Called by the executor for each event of a rank."""
        event = from_wire(data)
        if isinstance(event, DataPlaneStats):
            self.stats[rank] = event
            return
        if isinstance(event, PlaneFailed):
            self._on_plane_failed(f"the data plane of rank {rank} failed: {event.reason}")
            return
        if isinstance(event, PeerJoined):
            log.info(
                "rank %d of node %s is connected over %s%s",
                event.rank,
                event.node_id,
                event.carrier,
                f" ({event.note})" if event.note else "",
            )
            return
        if isinstance(event, PeerLost):
            log.warning("lost rank %d of node %s: %s", event.rank, event.node_id, event.reason)
            return
        assert not isinstance(event, Command)
        attempt = self._attempts.get((event.transfer_id, event.attempt))
        if attempt is not None:
            attempt.news.put_nowait(event)
            if isinstance(event, _LAST):
                attempt.silent.add(rank)

    async def close(self, attempt: Attempt, *, sending: bool) -> None:
        """Return once no rank reads or writes the attempt's blocks: cancel what still runs.

        When a rank does not confirm in time its blocks can never be freed safely, so the node is
        declared lost rather than left to leak.
        """
        kind = CancelSend if sending else CancelExpect
        for rank in set(range(attempt.ranks)) - attempt.silent:
            command = kind(transfer_id=attempt.transfer_id, attempt=attempt.attempt)
            self._send(rank, to_wire(command))
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                while len(attempt.silent) < attempt.ranks:
                    await attempt.news.get()
        except TimeoutError:
            self._on_plane_failed(
                f"a rank did not confirm within {QUIET_SECONDS:g} s that transfer "
                f"{attempt.transfer_id} is cancelled"
            )
        finally:
            self._attempts.pop((attempt.transfer_id, attempt.attempt), None)
