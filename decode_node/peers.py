"""The prefill nodes that this decode node has met: channels, greetings, leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict

import grpc

from ..proto import tandem_pb2 as pb
from ..proto.tandem_pb2_grpc import PrefillStub
from ..shared.errors import PeerRefusedError, TransferError
from ..shared.handoff.lease import LeaseTrust
from ..shared.handoff.peer import introduction
from ..shared.node.engine import NodeEngine, NodeIdentity
from .peer import Peer, endpoints_of

log = logging.getLogger("tandem.decode")

HELLO_SECONDS = 2.0
RECONCILE_SECONDS = 5.0
# Renewals come at a third of a lease; a peer that grants hardly any must not keep us busy.
MIN_RENEW_SECONDS = 0.1
MAX_PEERS = 1024


class Peers:
    """Greets a prefill node once an epoch, and keeps its leases alive."""

    def __init__(self, engine: NodeEngine, identity: NodeIdentity) -> None:
        self._engine = engine
        self._identity = identity
        self._peers: dict[str, Peer] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._met = asyncio.Event()

    async def meet(self, candidate: pb.PrefillCandidate) -> Peer:
        """The greeted peer. Raises ``TransferError``; ``PeerRefusedError`` for another model."""
        async with self._locks[candidate.address]:
            known = self._peers.get(candidate.address)
            if known is not None and candidate.epoch in (0, known.epoch):
                return known
            if known is not None:
                await self.forget(known)
            if len(self._peers) >= MAX_PEERS:
                raise TransferError(f"{MAX_PEERS} prefill nodes are known, which is the limit")
            peer = await self._greet(candidate.address)
            self._peers[candidate.address] = peer
            self._met.set()
            return peer

    async def forget(self, peer: Peer) -> None:
        """Greet again before the next transfer: the process behind the address is another one."""
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
        await peer.channel.close(grace=0)

    async def close(self) -> None:
        for peer in list(self._peers.values()):
            await self.forget(peer)

    async def keep_leases(self) -> None:
        """Runs for ever: renews, in one call a peer, what is alive here."""
        while True:
            seconds = min((_renew_seconds(peer) for peer in self._peers.values()), default=None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._met.wait()  # somebody new, perhaps with a shorter lease
            self._met.clear()
            peers = [peer for peer in self._peers.values() if peer.trust.ids]
            await asyncio.gather(*(self._renew(peer) for peer in peers))

    async def reconcile(self) -> None:
        """Runs for ever: releases what only the peer holds."""
        while True:
            await asyncio.sleep(RECONCILE_SECONDS)
            await asyncio.gather(*(self._free_orphans(peer) for peer in self._peers.values()))

    async def _greet(self, address: str) -> Peer:
        channel = grpc.aio.insecure_channel(address, options=_CHANNEL)
        stub = PrefillStub(channel)
        try:
            reply = await stub.Hello(
                introduction(self._engine, self._identity), timeout=HELLO_SECONDS
            )
            return self._introduced(address, reply, stub, channel)
        except grpc.aio.AioRpcError as error:
            await channel.close(grace=0)
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise PeerRefusedError(f"{address}: {error.details()}") from None
            raise TransferError(f"{address} does not answer: {error.details()}") from None
        except BaseException:
            await channel.close(grace=0)
            raise

    def _introduced(
        self, address: str, reply: pb.HelloReply, stub: PrefillStub, channel: grpc.aio.Channel
    ) -> Peer:
        if len(reply.ranks) != self._engine.world_size:
            raise PeerRefusedError(
                f"{address} has {len(reply.ranks)} ranks, here are {self._engine.world_size}"
            )
        return Peer(
            address=address,
            node_id=reply.node.node_id,
            epoch=reply.node.epoch,
            endpoints=endpoints_of(list(reply.ranks), address),
            stub=stub,
            channel=channel,
            trust=LeaseTrust(reply.lease_seconds, time.monotonic),
        )

    async def _renew(self, peer: Peer) -> None:
        asked_at = time.monotonic()
        with contextlib.suppress(grpc.aio.AioRpcError):
            ids = self._ids(peer.trust.ids)
            held = await peer.stub.Renew(ids, timeout=_renew_seconds(peer))
            peer.trust.renewed(held.ids, asked_at)

    async def _free_orphans(self, peer: Peer) -> None:
        me = pb.LiveRequest(node_id=self._identity.node_id, epoch=self._identity.epoch)
        with contextlib.suppress(grpc.aio.AioRpcError):
            held = await peer.stub.Live(me, timeout=HELLO_SECONDS)
            orphans = peer.trust.orphans(held.ids)
            if orphans:
                log.warning("%s holds transfers %s that ended here", peer.address, orphans)
                await peer.stub.Release(self._ids(orphans), timeout=HELLO_SECONDS)

    def _ids(self, ids: list[int]) -> pb.TransferIds:
        return pb.TransferIds(node_id=self._identity.node_id, epoch=self._identity.epoch, ids=ids)


def _renew_seconds(peer: Peer) -> float:
    return max(MIN_RENEW_SECONDS, peer.trust.lease_seconds / 3)


# A vanished peer must be noticed within three seconds, also on an idle connection.
_CHANNEL = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 4 << 20),
]
