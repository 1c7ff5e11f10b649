"""The head's view of its ranks' data planes: a queue of events for each (transfer, attempt)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..config.limits import MAX_PEERS
from ..process.standstill import within
from .plane.messages import (
    CancelExpect,
    Cancelled,
    CancelSend,
    Command,
    Compare,
    Compared,
    Event,
    Expect,
    KeysAdmitted,
    OpenSend,
    PeerJoined,
    PeerLost,
    PlaneFailed,
    Received,
    ReceiveFailed,
    SendFailed,
    SendFinished,
)
from .plane.stats import DataPlaneStats

log = logging.getLogger("tandem.handoff")

QUIET_SECONDS = 10.0
# Stand for a carrier: not connected yet, or different carriers between ranks.
NONE, MIXED = "none", "mixed"


class Connections:
    """The carrier to each start of a peer. Entries outlive their connections, so that attempts that
    ended with a connection can still be counted; the oldest peer is dropped first."""

    def __init__(self, max_peers: int = MAX_PEERS) -> None:
        self._max_peers = max_peers
        self._carriers: dict[tuple[str, int], dict[tuple[int, int], str]] = {}

    def joined(self, rank: int, event: PeerJoined) -> None:
        """Record that ``rank`` of this node is connected with a rank of the peer."""
        key = (event.node_id, event.epoch)
        if key not in self._carriers and len(self._carriers) >= self._max_peers:
            del self._carriers[next(iter(self._carriers))]
        self._carriers.setdefault(key, {})[rank, event.rank] = event.carrier

    def carrier(self, node_id: str, epoch: int) -> str:
        """The name of a carrier; ``mixed`` if ranks differ, ``none`` before they have connected."""
        names = set(self._carriers.get((node_id, epoch), {}).values())
        if len(names) > 1:
            return MIXED
        return names.pop() if names else NONE


class ExpectedAttempt:
    """The events of one attempt, from the ranks of this node and from the head.

    The queue is bounded by the attempt: a few events per part, one per step, and one per heartbeat.
    """

    def __init__(self, transfer_id: int, attempt: int) -> None:
        self.transfer_id = transfer_id
        self.attempt = attempt
        self.events: asyncio.Queue[object] = asyncio.Queue()
        self.busy: set[tuple[int, int]] = set()  # (rank, peer's rank) pairs whose blocks are in use

    @property
    def busy_ranks(self) -> set[int]:
        return {rank for rank, _ in self.busy}

    async def over(self) -> None:
        """Wait until no rank uses the attempt's blocks."""
        while self.busy:
            await self.events.get()

    def mark_busy(self, rank: int, command: Command) -> None:
        """Mark a command's blocks as busy on a rank."""
        if isinstance(command, (OpenSend, Expect)):
            self.busy.add((rank, command.peer_rank))
        elif isinstance(command, Compare):
            self.busy.add((rank, 0))

    def mark_done(self, rank: int, event: Event) -> None:
        """Unmark blocks that the rank no longer uses after an event."""
        if isinstance(event, (SendFinished, SendFailed, Received, ReceiveFailed)):
            self.busy.discard((rank, event.peer_rank))
        elif isinstance(event, (Compared, Cancelled)):
            self.busy = {part for part in self.busy if part[0] != rank}


class Inbox:
    """Routes events to attempts, and waits until a cancelled attempt no longer uses its blocks."""

    def __init__(
        self,
        send: Callable[[int, Command], None],
        on_plane_failed: Callable[[str], None],
        *,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self._send = send
        self._on_plane_failed = on_plane_failed
        self._attempts: dict[tuple[int, int], ExpectedAttempt] = {}
        self.stats: dict[int, DataPlaneStats] = {}  # the last report of each rank
        self.connections = Connections(max_peers)
        # Called with a rank, and the version of the list of keys now in force there.
        self.on_admitted: Callable[[int, int], None] = lambda rank, version: None
        self.on_lost: Callable[[PeerLost], None] = lambda event: None

    def open(self, transfer_id: int, attempt: int) -> ExpectedAttempt:
        """Begin to collect events. Raises ``KeyError`` if the attempt is already open."""
        key = (transfer_id, attempt)
        if key in self._attempts:
            raise KeyError(f"transfer {transfer_id} attempt {attempt} is already open")
        self._attempts[key] = ExpectedAttempt(transfer_id, attempt)
        return self._attempts[key]

    def command(self, attempt: ExpectedAttempt, rank: int, command: Command) -> None:
        attempt.mark_busy(rank, command)
        self._send(rank, command)

    def tell(self, rank: int, command: Command) -> None:
        """Send a command that belongs to no attempt."""
        self._send(rank, command)

    def on_event(self, rank: int, event: Event) -> None:
        """Handle an event of a rank; called by the executor."""
        if isinstance(event, DataPlaneStats):
            self.stats[rank] = event
            return
        if isinstance(event, KeysAdmitted):
            self.on_admitted(rank, event.version)
            return
        if isinstance(event, PlaneFailed):
            self._on_plane_failed(f"the data plane of rank {rank} failed: {event.reason}")
            return
        if isinstance(event, PeerJoined):
            self.connections.joined(rank, event)
            log.log(
                logging.WARNING if event.note else logging.INFO,  # a better carrier does not work
                "rank %d of node %s is connected over %s%s",
                event.rank,
                event.node_id,
                event.carrier,
                f" ({event.note})" if event.note else "",
            )
            return
        if isinstance(event, PeerLost):
            log.warning("lost rank %d of node %s: %s", event.rank, event.node_id, event.reason)
            self.on_lost(event)
            return
        attempt = self._attempts.get((event.transfer_id, event.attempt))
        if attempt is not None:
            attempt.events.put_nowait(event)
            attempt.mark_done(rank, event)

    async def close(self, attempt: ExpectedAttempt, *, sending: bool) -> None:
        """Cancel what still runs, and wait until no rank reads or writes the attempt's blocks.

        If a rank does not confirm in time, its blocks can never be freed safely, so the node is
        declared lost.
        """
        kind = CancelSend if sending else CancelExpect
        for rank in attempt.busy_ranks:
            command = kind(transfer_id=attempt.transfer_id, attempt=attempt.attempt)
            self._send(rank, command)
        try:
            await within(QUIET_SECONDS, attempt.over, afterwards=QUIET_SECONDS)
        except TimeoutError:
            self._on_plane_failed(
                f"a rank did not confirm within {QUIET_SECONDS:g} s that transfer "
                f"{attempt.transfer_id} is cancelled"
            )
        finally:
            self._attempts.pop((attempt.transfer_id, attempt.attempt), None)
