"""Examinations of prefill nodes for ``tandem doctor``: whether KV gets here, and how fast."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from ..proto import tandem_pb2 as pb
from ..shared.causes import Cause
from ..shared.config.limits import MAX_EXAMINED
from ..shared.errors import PeerRefusedError, TransferError
from .canary import Canary
from .peering.peer import Peer, PeerLostError
from .peering.peers import Peers
from .peering.prefill_backoff import SILENCE
from .receiving import ReceivingNode

CONNECT_SECONDS = 2.0
# Time limit of all examinations of one RPC, below the doctor's own deadline.
PAIR_SECONDS = 12.0


class Examiner:
    """Greets a node, connects to it, and runs the canary, even if one has passed or this node backs
    off from that one: an operator who examines a node may have just repaired it."""

    def __init__(self, node: ReceivingNode, peers: Peers, canary: Canary) -> None:
        self._node = node
        self._peers = peers
        self._canary = canary
        self._examining = asyncio.Lock()

    @property
    def busy(self) -> bool:
        return self._examining.locked()

    async def examine(self, candidates: Sequence[pb.PrefillCandidate]) -> pb.ExamineReply:
        """One report for each of at most ``MAX_EXAMINED`` candidates, examined concurrently."""
        async with self._examining:
            pairs = await asyncio.gather(*map(self._pair, candidates[:MAX_EXAMINED]))
            return pb.ExamineReply(pairs=pairs, left_out=len(candidates) - len(pairs))

    async def _pair(self, candidate: pb.PrefillCandidate) -> pb.PairReport:
        report = pb.PairReport(node_id=candidate.node_id, address=candidate.address)
        try:
            async with asyncio.timeout(PAIR_SECONDS):
                await self._examine(candidate, report)
        except TransferError as error:
            report.problem, report.cause = str(error), error.cause.value
        except TimeoutError:
            report.problem = f"the examination did not end within {PAIR_SECONDS:g} s"
            report.cause = Cause.TIMEOUT_TRANSFER.value
        return report

    async def _examine(self, candidate: pb.PrefillCandidate, report: pb.PairReport) -> None:
        try:
            peer = await self._peers.greet(candidate, at_once=True)
        except TransferError as error:
            if error.cause in SILENCE:
                report.round_trip_seconds = await self._peers.ping(candidate)
            raise
        start = time.monotonic()
        await self._peers.live_transfers(peer)
        report.round_trip_seconds = time.monotonic() - start
        try:
            await self._run_canary(candidate, report)
        except PeerRefusedError:
            raise
        except TransferError:
            # A closed port explains more than the failure that follows from it. Tried only after a
            # failure, because the peer counts each such connection as one from a stranger.
            await _connect(peer)
            raise
        self._peers.prefill_backoff.end(candidate.address)

    async def _run_canary(self, candidate: pb.PrefillCandidate, report: pb.PairReport) -> None:
        peer = await self._peers.meet(candidate, at_once=True)
        start = time.monotonic()
        try:
            moved = await self._canary.check(peer)
        except PeerLostError:
            await self._peers.forget(peer)
            raise
        report.canary_seconds = time.monotonic() - start
        report.carrier = self._node.inbox.connections.carrier(peer.node_id, peer.epoch)
        report.bytes_per_token = moved / self._canary.tokens
        report.tokens_per_second = peer.link.tokens_per_second


async def _connect(peer: Peer) -> None:
    """Connect to each port of the peer's data plane. Raises ``TransferError`` if one cannot be
    reached."""
    for endpoint in dict.fromkeys(
        at for rank in peer.endpoints for at in (rank.bulk, rank.control)
    ):
        address = urlsplit(endpoint)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if address.scheme == "ipc":
                    _, writer = await asyncio.open_unix_connection(address.path)
                else:
                    _, writer = await asyncio.open_connection(address.hostname, address.port)
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", None) or f"no answer within {CONNECT_SECONDS:g} s"
            raise TransferError(
                f"its data port {address.netloc or address.path} cannot be reached: {why}",
                cause=Cause.TIMEOUT_GREET,
            ) from None
        writer.close()
