"""The head's view of its ranks' data planes: one waiting place for each (transfer, attempt)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..config.limits import MAX_PEERS
from .connections import Connections
from .plane.messages import (
    Admitted,
    CancelExpect,
    Cancelled,
    CancelSend,
    Command,
    Compare,
    Compared,
    Event,
    Expect,
    OpenSend,
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
from .plane.stats import DataPlaneStats

log = logging.getLogger("tandem.handoff")

QUIET_SECONDS = 10.0


class ExpectedAttempt:
    """The news of one attempt: events from the ranks of this node, and what the head adds.

    The queue is bounded by what can happen in one attempt: a few events a part, one a step, and one
    a sign of life.
    """

    def __init__(self, transfer_id: int, attempt: int) -> None:
        self.transfer_id = transfer_id
        self.attempt = attempt
        self.news: asyncio.Queue[object] = asyncio.Queue()
        self.busy: set[tuple[int, int]] = set()  # ranks that hold blocks, with the peer's rank

    @property
    def busy_ranks(self) -> set[int]:
        return {rank for rank, _ in self.busy}

    def engage(self, rank: int, command: Command) -> None:
        """The rank was given blocks: they are busy until an event says otherwise."""
        if isinstance(command, (OpenSend, Expect)):
            self.busy.add((rank, command.peer_rank))
        elif isinstance(command, Compare):
            self.busy.add((rank, 0))

    def quiet(self, rank: int, event: Event) -> None:
        """What the event says the rank does not touch any more."""
        if isinstance(event, (SendFinished, SendFailed, Received, ReceiveFailed)):
            self.busy.discard((rank, event.peer_rank))
        elif isinstance(event, (Compared, Cancelled)):
            self.busy = {one for one in self.busy if one[0] != rank}


class Inbox:
    """Sorts events to attempts, and proves that a cancelled attempt touches no block any more."""

    def __init__(
        self,
        send: Callable[[int, bytes], None],
        on_plane_failed: Callable[[str], None],
        *,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self._send = send
        self._on_plane_failed = on_plane_failed
        self._attempts: dict[tuple[int, int], ExpectedAttempt] = {}
        self.stats: dict[int, DataPlaneStats] = {}  # what each rank last reported
        self.connections = Connections(max_peers)
        # Rank and version of a list of keys that is in force there.
        self.on_admitted: Callable[[int, int], None] = lambda rank, version: None

    def open(self, transfer_id: int, attempt: int) -> ExpectedAttempt:
        """Begin to collect events. Raises ``KeyError`` when the attempt is already open."""
        key = (transfer_id, attempt)
        if key in self._attempts:
            raise KeyError(f"transfer {transfer_id} attempt {attempt} is already open")
        self._attempts[key] = ExpectedAttempt(transfer_id, attempt)
        return self._attempts[key]

    def command(self, attempt: ExpectedAttempt, rank: int, command: Command) -> None:
        attempt.engage(rank, command)
        self._send(rank, to_wire(command))

    def tell(self, rank: int, command: Command) -> None:
        """A command that belongs to no attempt."""
        self._send(rank, to_wire(command))

    def on_event(self, rank: int, data: bytes) -> None:
        """Called by the executor for each event of a rank."""
        event = from_wire(data)
        if isinstance(event, DataPlaneStats):
            self.stats[rank] = event
            return
        if isinstance(event, Admitted):
            self.on_admitted(rank, event.version)
            return
        if isinstance(event, PlaneFailed):
            self._on_plane_failed(f"the data plane of rank {rank} failed: {event.reason}")
            return
        if isinstance(event, PeerJoined):
            self.connections.joined(rank, event)
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
            attempt.quiet(rank, event)

    async def close(self, attempt: ExpectedAttempt, *, sending: bool) -> None:
        """Return once no rank reads or writes the attempt's blocks: cancel what still runs.

        When a rank does not confirm in time its blocks can never be freed safely, so the node is
        declared lost rather than left to leak.
        """
        kind = CancelSend if sending else CancelExpect
        for rank in attempt.busy_ranks:
            command = kind(transfer_id=attempt.transfer_id, attempt=attempt.attempt)
            self._send(rank, to_wire(command))
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                while attempt.busy:
                    await attempt.news.get()
        except TimeoutError:
            self._on_plane_failed(
                f"a rank did not confirm within {QUIET_SECONDS:g} s that transfer "
                f"{attempt.transfer_id} is cancelled"
            )
        finally:
            self._attempts.pop((attempt.transfer_id, attempt.attempt), None)
