"""The prefill nodes that this decode node has met: channels, greetings, canaries, leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import grpc

from ..proto import tandem_pb2 as pb
from ..proto.tandem_pb2_grpc import PrefillStub
from ..shared.causes import Cause
from ..shared.config.limits import MAX_PEERS
from ..shared.engine.start import NodeEngine, NodeIdentity
from ..shared.errors import PeerRefusedError, TransferError
from ..shared.handoff.carriers.zeromq.curve import check_keys
from ..shared.handoff.lease import LeaseTrust
from ..shared.handoff.wire.head_parts import parts_of
from ..shared.node.introduction import CAPABILITY_WINDOWS, introduction
from ..shared.node.metrics import NodeMetrics
from ..shared.security.addresses import is_candidate
from ..shared.security.credentials import INSECURE, Credentials
from .link import MeasuredLink
from .peer import Peer, PeerLostError, calling, endpoints_of
from .prefill_backoff import CONDITION, PrefillBackoff
from .refused_peers import RefusedPeers

log = logging.getLogger("tandem.decode")

HELLO_SECONDS = 2.0
RECONCILE_SECONDS = 5.0
# For the answer of a process that may have ended.
ENDED_SECONDS = 1.0
# How long after a canary has begun requests still wait for it; then they go elsewhere at once.
VET_SECONDS = 5.0
# Renewals come at a third of a lease; a peer that grants hardly any must not keep us busy, and one
# that grants very long ones is looked at now and then, because it may have been forgotten.
MIN_RENEW_SECONDS = 0.1
MAX_RENEW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Vetting:
    """A canary under way, or what has come of it."""

    canary: asyncio.Task[TransferError | None]
    begun: float = field(default_factory=time.monotonic)


class Peers:
    """Greets a prefill node once an epoch, and keeps its leases alive.

    ``vet`` closes a greeting: it raises ``PeerRefusedError`` for a node that computes other KV than
    this one, ``TransferError`` when it could not tell. It runs once for each pair of epochs.
    """

    def __init__(
        self,
        engine: NodeEngine,
        identity: NodeIdentity,
        vet: Callable[[Peer], Awaitable[object]],
        metrics: NodeMetrics,
        credentials: Credentials = INSECURE,
        *,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._vet = vet
        self._metrics = metrics
        self._credentials = credentials
        self._max_peers = max_peers
        self._peers: dict[str, Peer] = {}
        self._canaries: dict[Peer, _Vetting] = {}
        self._passed: dict[str, int] = {}  # node to epoch
        self._refused_peers = RefusedPeers()
        self.prefill_backoff = PrefillBackoff(time.monotonic)
        # One an address, for as long as somebody greets it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._met = asyncio.Event()

    async def meet(self, candidate: pb.PrefillCandidate) -> Peer:
        """The greeted peer, whose canary has passed.

        Raises ``TransferError``; ``PeerRefusedError`` for a node with which no transfer can work.
        """
        peer = await self.greet(candidate)
        if peer not in self._canaries:
            self._canaries[peer] = _Vetting(asyncio.create_task(self._sing(peer)))
        await self._vetted(peer, self._canaries[peer])
        return peer

    async def greet(self, candidate: pb.PrefillCandidate) -> Peer:
        """The greeted peer, whose canary may not have passed yet. Raises like ``meet``."""
        async with self._locks.setdefault(candidate.address, asyncio.Lock()):
            return await self._greeted(candidate)

    async def held(self, peer: Peer) -> list[int]:
        """The transfers that the peer keeps for this node. Raises ``TransferError``."""
        with calling():
            return list((await self._live(peer)).ids)

    @property
    def refused(self) -> list[pb.RefusedPeer]:
        """The nodes with which no transfer can work, and why."""
        return self._refused_peers.all()

    def refuses(self, candidate: pb.PrefillCandidate) -> bool:
        return self._refused_peers.holds(candidate.address, candidate.epoch)

    def link(self, candidate: pb.PrefillCandidate) -> MeasuredLink:
        """What is known of the way to a node, which may never have been met."""
        peer = self._peers.get(candidate.address)
        return peer.link if peer is not None else MeasuredLink()

    def link_rates(self) -> list[pb.LinkRate]:
        """What routers may know of the measured links; the greeted peers bound it."""
        return [
            pb.LinkRate(node_id=peer.node_id, tokens_per_second=peer.link.tokens_per_second)
            for peer in self._peers.values()
            if peer.link.tokens_per_second
        ]

    async def forget(self, peer: Peer) -> None:
        """Greet again before the next transfer: the process behind the address is another one."""
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
        vetting = self._canaries.get(peer)
        if vetting is not None:
            vetting.canary.add_done_callback(lambda _: self._canaries.pop(peer, None))
        await peer.channel.close(grace=0)

    async def has_ended(self, candidate: pb.PrefillCandidate) -> bool:
        """Whether nobody listens at the address any more, or another start of the process does. One
        that is silent may have been stopped, or cut off."""
        channel = self._credentials.channel(candidate.address, _CHANNEL)
        try:
            stub = self._credentials.stub(PrefillStub, channel)
            hello = introduction(self._engine, self._identity)
            reply = await stub.Hello(hello, timeout=ENDED_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            await channel.close(grace=0)
        return bool(reply.node.epoch != candidate.epoch)

    async def close(self) -> None:
        canaries = [vetting.canary for vetting in self._canaries.values()]
        for canary in canaries:
            canary.cancel()
        await asyncio.gather(*canaries, return_exceptions=True)
        for peer in list(self._peers.values()):
            await self.forget(peer)

    async def keep_leases(self) -> None:
        """Runs for ever: renews what is alive here, for each peer apart, because one that does not
        answer, or grants long leases, must not keep others waiting beyond theirs."""
        kept: set[Peer] = set()
        async with asyncio.TaskGroup() as keepers:
            while True:
                await self._met.wait()
                self._met.clear()
                peers = set(self._peers.values())
                for peer in peers - kept:
                    keepers.create_task(self._keep(peer))
                kept = peers

    async def reconcile(self) -> None:
        """Runs for ever: releases what only the peer holds, and forgets peers that have gone."""
        while True:
            await asyncio.sleep(RECONCILE_SECONDS)
            await asyncio.gather(*(self._look_after(peer) for peer in self._peers.values()))

    async def _greeted(self, candidate: pb.PrefillCandidate) -> Peer:
        if not is_candidate(candidate.address):
            raise TransferError(f"{candidate.address[:100]!r} is not the host:port of a node")
        # Behind the lock: of many who come at once, one finds out, and the others hear of it.
        self.prefill_backoff.check(candidate.address, candidate.epoch)
        known = self._peers.get(candidate.address)
        if known is not None and candidate.epoch in (0, known.epoch):
            return known
        if known is None and len(self._peers) >= self._max_peers:
            raise TransferError(
                f"{self._max_peers} prefill nodes are known, which is the limit; see --max-peers"
            )
        try:
            peer = await self._greet(candidate.address)
        except PeerRefusedError as error:
            if candidate.epoch:  # a refusal of "whoever is there" would outlive the process
                self._refused_peers.add(
                    candidate.address, candidate.node_id, candidate.epoch, error
                )
            raise
        return await self._settled(peer)

    async def _settled(self, peer: Peer) -> Peer:
        """Who answered is the peer from now on, unless it is the one that is known already."""
        known = self._peers.get(peer.address)
        if known is not None and known.epoch == peer.epoch:
            # Whoever named another epoch has not heard of the restart yet. To close what stands
            # would end the transfers of those who have.
            await peer.channel.close(grace=0)
            return known
        if known is not None:
            await self.forget(known)
        self._peers[peer.address] = peer
        self._met.set()
        return peer

    async def _sing(self, peer: Peer) -> TransferError | None:
        """Runs the canary unless it has passed before; returns why the peer cannot be used now."""
        if self._passed.get(peer.node_id) == peer.epoch:
            return None
        begun = time.monotonic()
        try:
            await self._vet(peer)
        except TransferError as error:
            outcome = "failed"
            if isinstance(error, PeerRefusedError):
                outcome = "mismatch"
                self._refused_peers.add(peer.address, peer.node_id, peer.epoch, error)
            log.warning("the canary of %s: %s", peer.address, error)
            self._metrics.canaries.labels(outcome).inc()
            return error
        log.info("the canary of %s passed in %.3f s", peer.address, time.monotonic() - begun)
        self._metrics.canaries.labels("passed").inc()
        if len(self._passed) >= self._max_peers:
            del self._passed[next(iter(self._passed))]
        self._passed[peer.node_id] = peer.epoch
        return None

    async def _vetted(self, peer: Peer, vetting: _Vetting) -> None:
        """Wait for the canary, but not for one that takes long."""
        left = vetting.begun + VET_SECONDS - time.monotonic()
        await asyncio.wait([vetting.canary], timeout=max(0.0, left))
        if not vetting.canary.done():
            waiting = f"{peer.address}: its canary is still under way"
            raise TransferError(waiting, cause=Cause.CANARY)
        if vetting.canary.cancelled():
            raise TransferError("the node is shutting down", cause=Cause.STOPPING)
        error = vetting.canary.result()
        if error is not None:
            await self.forget(peer)
            self._refused_peers.check(peer.address, peer.epoch)
            cause = error.cause if error.cause in CONDITION else Cause.CANARY
            raise TransferError(str(error), cause=cause)

    async def _greet(self, address: str) -> Peer:
        channel = self._credentials.channel(address, _CHANNEL)
        stub = self._credentials.stub(PrefillStub, channel)
        asked_at = time.monotonic()
        try:
            reply = await stub.Hello(
                introduction(self._engine, self._identity), timeout=HELLO_SECONDS
            )
            self._refused_peers.check(address, reply.node.epoch)
            peer = self._introduced(address, reply, stub, channel)
            peer.link.answered(time.monotonic() - asked_at)
            return peer
        except grpc.aio.AioRpcError as error:
            await channel.close(grace=0)
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise PeerRefusedError(f"{address}: {error.details()}") from None
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                full = f"{address} has no place for this node: {error.details()}"
                raise TransferError(full, cause=Cause.NO_PLACE) from None
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                refused = f"{address} refuses this node: {error.details()}"
                raise TransferError(refused, cause=Cause.REFUSED) from None
            silent = f"{address} does not answer: {self._credentials.explain(error)}"
            raise TransferError(silent, cause=Cause.PEER_LOST) from None
        except BaseException:
            await channel.close(grace=0)
            raise

    def _introduced(
        self, address: str, reply: pb.HelloReply, stub: PrefillStub, channel: grpc.aio.Channel
    ) -> Peer:
        heads = self._engine.kv_heads(len(reply.ranks))
        if not 0 < reply.lease_seconds < math.inf:  # NaN is not, either
            raise TransferError(f"{address}: lease_seconds is {reply.lease_seconds}, not a time")
        # Locked as this node is, or open as it is: KV must not pass in the clear by accident.
        expected = len(reply.ranks) if self._engine.curve_keys else 0
        check_keys(reply.node.curve_keys, expected, address)
        return Peer(
            address=address,
            node_id=reply.node.node_id,
            epoch=reply.node.epoch,
            endpoints=endpoints_of(reply, address),
            kv_dtype=reply.node.kv_dtype,
            parts=parts_of(self._engine.kv_heads(self._engine.world_size), heads),
            stub=stub,
            channel=channel,
            trust=LeaseTrust(reply.lease_seconds, time.monotonic),
            # A node that does not tell keeps KV in the format of its weights.
            weight_format=reply.node.weight_format or reply.node.kv_dtype,
            sends_windows=bool(reply.node.capabilities & CAPABILITY_WINDOWS),
        )

    async def _keep(self, peer: Peer) -> None:
        """In one call for all of its leases, until it is forgotten."""
        while self._peers.get(peer.address) is peer:
            await asyncio.sleep(_renew_seconds(peer))
            if peer.trust.ids:
                await self._renew(peer)

    async def _renew(self, peer: Peer) -> None:
        asked_at = time.monotonic()
        with contextlib.suppress(TransferError), calling():
            ids = self._ids(peer.trust.ids)
            held = await peer.stub.Renew(ids, timeout=_renew_seconds(peer))
            peer.trust.renewed(held.ids, asked_at)
            peer.link.answered(time.monotonic() - asked_at)

    async def _live(self, peer: Peer) -> pb.TransferIds:
        me = pb.LiveRequest(node_id=self._identity.node_id, epoch=self._identity.epoch)
        return await peer.stub.Live(me, timeout=HELLO_SECONDS)

    async def _look_after(self, peer: Peer) -> None:
        try:
            with calling():
                await self._free_orphans(peer)
        except TransferError as error:
            # One that left in peace fails no attempt, since routers name it no more.
            if isinstance(error, PeerLostError) and not peer.trust.ids:
                log.info("%s is forgotten: %s", peer.address, error)
                await self.forget(peer)

    async def _free_orphans(self, peer: Peer) -> None:
        held = await self._live(peer)
        if held.greet_again:
            await self.forget(peer)
            return
        orphans = peer.trust.orphans(held.ids)
        if orphans:
            log.warning("%s holds transfers %s that ended here", peer.address, orphans)
            await peer.stub.Release(self._ids(orphans), timeout=HELLO_SECONDS)

    def _ids(self, ids: list[int]) -> pb.TransferIds:
        return pb.TransferIds(node_id=self._identity.node_id, epoch=self._identity.epoch, ids=ids)


def _renew_seconds(peer: Peer) -> float:
    return min(MAX_RENEW_SECONDS, max(MIN_RENEW_SECONDS, peer.trust.lease_seconds / 3))


# A vanished peer must be noticed within three seconds, also on an idle connection.
_CHANNEL = [
    ("grpc.keepalive_time_ms", 1000),
    # Otherwise gRPC waits a minute for the answer, whatever keepalive_timeout_ms says.
    ("grpc.http2.ping_timeout_ms", 1500),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 4 << 20),
]
