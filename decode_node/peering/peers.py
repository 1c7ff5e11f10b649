"""The prefill nodes that this decode node has greeted, and their leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from ...proto import tandem_pb2 as pb
from ...shared.causes import Cause
from ...shared.config.limits import MAX_PEERS
from ...shared.engine.start import NodeEngine, NodeIdentity
from ...shared.errors import PeerRefusedError, TransferError
from ...shared.handoff.plane.messages import PeerLost
from ...shared.node.metrics import NodeMetrics
from ...shared.security.addresses import is_candidate
from ...shared.security.credentials import INSECURE, Credentials
from .canary_runs import CanaryRuns
from .greeter import HELLO_SECONDS, Greeter
from .peer import Peer, PeerLostError, rpc_errors
from .prefill_backoff import CONDITION, PrefillBackoff
from .refused_peers import RefusedPeers

log = logging.getLogger("tandem.decode")

RECONCILE_SECONDS = 5.0
# Leases are renewed at a third of their length, within these limits: very short leases must not
# keep this node busy, and with very long ones a restart of the peer must still be noticed.
MIN_RENEW_SECONDS = 0.1
MAX_RENEW_SECONDS = 10.0


class Peers:
    """Greets a prefill node once for each of its epochs, and keeps its leases alive.

    ``check_canary`` completes a greeting, see ``CanaryRuns``.
    """

    def __init__(
        self,
        engine: NodeEngine,
        identity: NodeIdentity,
        check_canary: Callable[[Peer], Awaitable[object]],
        metrics: NodeMetrics,
        credentials: Credentials = INSECURE,
        *,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self._identity = identity
        self._max_peers = max_peers
        self._peers: dict[str, Peer] = {}
        self._lost: set[Peer] = set()  # of those: a connection of the data plane has ended
        self._refused_peers = RefusedPeers()
        self._greeter = Greeter(engine, identity, self._refused_peers, credentials)
        self._canaries = CanaryRuns(check_canary, self._refused_peers, metrics, max_peers)
        self.prefill_backoff = PrefillBackoff(time.monotonic)
        # One for each address that is being greeted.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._greeted = asyncio.Event()

    # ---- greetings -------------------------------------------------------------------------

    async def meet(self, candidate: pb.PrefillCandidate, *, at_once: bool = False) -> Peer:
        """Greet a node unless it is known, and wait for its canary; ``at_once``: see ``greet``.

        Raises ``TransferError``; ``PeerRefusedError`` for a node with which no transfer can work.
        """
        peer = await self.greet(candidate, at_once=at_once)
        error = await self._canaries.result(peer)
        if error is not None:
            await self.forget(peer)
            self._refused_peers.check(peer.address, peer.epoch)
            cause = error.cause if error.cause in CONDITION else Cause.CANARY
            raise TransferError(str(error), cause=cause)
        return peer

    async def greet(self, candidate: pb.PrefillCandidate, *, at_once: bool = False) -> Peer:
        """Greet a node unless it is known; ``at_once``: even while this node backs off from it.

        The peer's canary may not have passed yet. Raises like ``meet``."""
        async with self._locks.setdefault(candidate.address, asyncio.Lock()):
            return await self._greet(candidate, at_once)

    async def _greet(self, candidate: pb.PrefillCandidate, at_once: bool) -> Peer:
        if not is_candidate(candidate.address):
            raise TransferError(f"{candidate.address[:100]!r} is not the host:port of a node")
        # Inside the lock: one of the concurrent requests probes, the others reuse its result.
        if not at_once:
            self.prefill_backoff.check(candidate.address, candidate.epoch)
        current = self._peers.get(candidate.address)
        if (
            current is not None
            and current not in self._lost
            and candidate.epoch in (0, current.epoch)
        ):
            return current
        if current is None and len(self._peers) >= self._max_peers:
            raise TransferError(
                f"{self._max_peers} prefill nodes are known, which is the limit; see --max-peers"
            )
        try:
            peer = await self._greeter.greet(candidate.address)
        except PeerRefusedError as error:
            if candidate.epoch:  # a refusal without an epoch would outlive the process
                self._refused_peers.add(
                    candidate.address, candidate.node_id, candidate.epoch, error
                )
            raise
        return await self._replace(peer)

    async def _replace(self, peer: Peer) -> Peer:
        """Replace the peer at the same address, unless it has the same epoch; returns the peer to
        use."""
        old = self._peers.get(peer.address)
        if old is not None and old.epoch == peer.epoch and old not in self._lost:
            # The router that named another epoch has not noticed the restart yet. Closing the old
            # peer would end transfers for routers that have.
            await peer.channel.close(grace=0)
            return old
        if old is not None:
            await self.forget(old)
        self._peers[peer.address] = peer
        self._greeted.set()
        return peer

    async def forget(self, peer: Peer) -> None:
        """Drop a peer, so that the next transfer greets the address again."""
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
        self._lost.discard(peer)
        self._canaries.forget(peer)
        await peer.channel.close(grace=0)

    def lost(self, event: PeerLost) -> None:
        """Back off from a peer whose data plane is gone, before each request finds that out.

        Its live transfers end by themselves and may still need its control plane, so it is only
        replaced by the next greeting. A peer that refuses connections is alive.
        """
        if event.cause != Cause.PEER_LOST:
            return
        for peer in self._peers.values():
            if (peer.node_id, peer.epoch) == (event.node_id, event.epoch):
                self._lost.add(peer)
                self.prefill_backoff.add(peer.address, peer.epoch, event.reason, Cause.PEER_LOST)

    async def ping(self, candidate: pb.PrefillCandidate) -> float:
        """See ``Greeter.ping``."""
        request = pb.LiveRequest(node_id=self._identity.node_id, epoch=self._identity.epoch)
        return await self._greeter.ping(candidate.address, request)

    async def has_ended(self, candidate: pb.PrefillCandidate) -> bool:
        """See ``Greeter.has_ended``."""
        return await self._greeter.has_ended(candidate)

    async def close(self) -> None:
        await self._canaries.close()
        for peer in list(self._peers.values()):
            await self.forget(peer)

    # ---- known peers -----------------------------------------------------------------------

    @property
    def refused(self) -> list[pb.RefusedPeer]:
        """The nodes with which no transfer can work, with the reasons."""
        return self._refused_peers.all()

    def refuses(self, candidate: pb.PrefillCandidate) -> bool:
        return self._refused_peers.refuses(candidate.address, candidate.epoch)

    def at(self, candidate: pb.PrefillCandidate) -> Peer | None:
        """The greeted peer at a node's address, if any."""
        return self._peers.get(candidate.address)

    def link_rates(self) -> list[pb.LinkRate]:
        """Measured rates for routers, at most one for each greeted peer."""
        return [
            pb.LinkRate(node_id=peer.node_id, tokens_per_second=peer.link.tokens_per_second)
            for peer in self._peers.values()
            if peer.link.tokens_per_second
        ]

    # ---- leases ----------------------------------------------------------------------------

    async def live_transfers(self, peer: Peer) -> list[int]:
        """Ids of the transfers that the peer keeps for this node. Raises ``TransferError``."""
        with rpc_errors():
            return list((await self._live(peer)).ids)

    async def keep_leases(self) -> None:
        """Renew the leases of every peer, until cancelled.

        Each peer has its own task: one that does not reply must not delay the others.
        """
        current: set[Peer] = set()
        async with asyncio.TaskGroup() as keepers:
            while True:
                await self._greeted.wait()
                self._greeted.clear()
                peers = set(self._peers.values())
                for peer in peers - current:
                    keepers.create_task(self._keep(peer))
                current = peers

    async def reconcile(self) -> None:
        """Release transfers that ended only here, and forget vanished peers, until cancelled."""
        while True:
            await asyncio.sleep(RECONCILE_SECONDS)
            await asyncio.gather(*(self._reconcile(peer) for peer in self._peers.values()))

    async def _keep(self, peer: Peer) -> None:
        """Renew all leases of a peer in one RPC, until it is forgotten."""
        while self._peers.get(peer.address) is peer:
            await asyncio.sleep(_renew_seconds(peer))
            if peer.trust.ids:
                await self._renew(peer)

    async def _renew(self, peer: Peer) -> None:
        start = time.monotonic()
        with contextlib.suppress(TransferError), rpc_errors():
            ids = self._ids(peer.trust.ids)
            reply = await peer.stub.Renew(ids, timeout=_renew_seconds(peer))
            peer.trust.renewed(reply.ids, start)
            peer.link.add_round_trip(time.monotonic() - start)

    async def _live(self, peer: Peer) -> pb.TransferIds:
        request = pb.LiveRequest(node_id=self._identity.node_id, epoch=self._identity.epoch)
        reply: pb.TransferIds = await peer.stub.Live(request, timeout=HELLO_SECONDS)
        return reply

    async def _reconcile(self, peer: Peer) -> None:
        try:
            with rpc_errors():
                await self._release_orphans(peer)
        except TransferError as error:
            # No attempt would notice that a peer without transfers is gone: routers no longer name
            # it.
            if isinstance(error, PeerLostError) and not peer.trust.ids:
                log.info("%s is forgotten: %s", peer.address, error)
                await self.forget(peer)

    async def _release_orphans(self, peer: Peer) -> None:
        reply = await self._live(peer)
        if reply.greet_again:
            await self.forget(peer)
            return
        orphans = peer.trust.orphans(reply.ids)
        if orphans:
            log.warning("%s holds transfers %s that ended here", peer.address, orphans)
            await peer.stub.Release(self._ids(orphans), timeout=HELLO_SECONDS)

    def _ids(self, ids: list[int]) -> pb.TransferIds:
        return pb.TransferIds(node_id=self._identity.node_id, epoch=self._identity.epoch, ids=ids)


def _renew_seconds(peer: Peer) -> float:
    return min(MAX_RENEW_SECONDS, max(MIN_RENEW_SECONDS, peer.trust.lease_seconds / 3))
