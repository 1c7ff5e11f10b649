"""The prefill nodes that this decode node has met: channels, greetings, leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import grpc

from ..proto import tandem_pb2 as pb
from ..proto.tandem_pb2_grpc import PrefillStub
from ..shared.errors import PeerRefusedError, TransferError
from ..shared.handoff.peer import CAPABILITIES, PROTOCOL_VERSION
from ..shared.node.engine import NodeEngine, NodeIdentity

log = logging.getLogger("tandem.decode")

HELLO_SECONDS = 2.0
RECONCILE_SECONDS = 5.0
MAX_PEERS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """A prefill node, greeted: where its control and data planes are."""

    address: str
    node_id: str
    epoch: int
    endpoints: tuple[tuple[str, str], ...]  # bulk and control of each rank
    stub: PrefillStub
    channel: grpc.aio.Channel
    live: set[int] = field(default_factory=set)  # transfers that this side believes in


class Peers:
    """Greets a prefill node once an epoch, and keeps its leases alive."""

    def __init__(self, engine: NodeEngine, identity: NodeIdentity, lease_seconds: float) -> None:
        self._engine = engine
        self._identity = identity
        self._lease = lease_seconds
        self._peers: dict[str, Peer] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

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
        """Runs for ever: renews what is live in batches, and releases what only the peer holds."""
        loop, reconciled = asyncio.get_running_loop(), 0.0
        while True:
            await asyncio.sleep(self._lease / 3)
            reconcile = loop.time() - reconciled >= RECONCILE_SECONDS
            if reconcile:
                reconciled = loop.time()
            peers = list(self._peers.values())
            await asyncio.gather(*(self._renew(peer, reconcile) for peer in peers))

    async def _greet(self, address: str) -> Peer:
        engine = self._engine
        channel = grpc.aio.insecure_channel(address, options=_CHANNEL)
        stub = PrefillStub(channel)
        request = pb.HelloRequest(
            protocol_version=PROTOCOL_VERSION,
            capabilities=CAPABILITIES,
            node_id=self._identity.node_id,
            epoch=self._identity.epoch,
            fingerprint=engine.fingerprint,
            tensor_parallel_size=engine.world_size,
            block_size=engine.resolved.block_size,
            kv_dtype=engine.kv_dtype,
        )
        try:
            reply = await stub.Hello(request, timeout=HELLO_SECONDS)
        except grpc.aio.AioRpcError as error:
            await channel.close(grace=0)
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise PeerRefusedError(f"{address}: {error.details()}") from None
            raise TransferError(f"{address} does not answer: {error.details()}") from None
        host = address.rpartition(":")[0]
        endpoints = tuple(
            (reachable(rank.bulk, host), reachable(rank.control, host)) for rank in reply.ranks
        )
        return Peer(address, reply.node_id, reply.epoch, endpoints, stub, channel)

    async def _renew(self, peer: Peer, reconcile: bool) -> None:
        node_id, epoch, timeout = self._identity.node_id, self._identity.epoch, self._lease / 3
        with contextlib.suppress(grpc.aio.AioRpcError):
            if peer.live:
                live = pb.TransferIds(node_id=node_id, epoch=epoch, ids=peer.live)
                await peer.stub.Renew(live, timeout=timeout)
            if reconcile:
                request = pb.LiveRequest(node_id=node_id, epoch=epoch)
                held = await peer.stub.Live(request, timeout=timeout)
                orphans = set(held.ids) - peer.live
                if orphans:
                    log.warning("%s holds transfers %s that ended here", peer.address, orphans)
                    ids = pb.TransferIds(node_id=node_id, epoch=epoch, ids=orphans)
                    await peer.stub.Release(ids, timeout=timeout)


# A vanished peer must be noticed within three seconds, also on an idle connection.
_CHANNEL = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 4 << 20),
]


def reachable(endpoint: str, host: str) -> str:
    """A wildcard address means: the host that the control plane was reached at."""
    parts = urlsplit(endpoint)
    if parts.hostname in ("0.0.0.0", "*", None, "::"):
        return f"tcp://{host}:{parts.port}"
    return endpoint
