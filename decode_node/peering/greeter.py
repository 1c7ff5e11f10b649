"""Greetings of prefill nodes, which identify the process at an address."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.tandem_pb2_grpc import PrefillStub
from ...shared.causes import Cause
from ...shared.engine.start import NodeEngine, NodeIdentity
from ...shared.errors import PeerRefusedError, TransferError
from ...shared.handoff.carriers.zeromq.curve import check_keys
from ...shared.handoff.lease import LeaseTrust
from ...shared.handoff.wire.head_parts import parts_of
from ...shared.node.introduction import introduction
from ...shared.security.credentials import INSECURE, LASTING, Credentials
from .peer import Peer, endpoints_of
from .refused_peers import RefusedPeers

if TYPE_CHECKING:
    from ...proto.tandem_pb2_grpc import PrefillAsyncStub

HELLO_SECONDS = 2.0
# Time limit of the reply of a process that may have ended.
ENDED_SECONDS = 1.0

_CHANNEL = (*LASTING, ("grpc.max_receive_message_length", 4 << 20))


class Greeter:
    """Greets prefill nodes. Peers that were refused before are refused again."""

    def __init__(
        self,
        engine: NodeEngine,
        identity: NodeIdentity,
        refused: RefusedPeers,
        credentials: Credentials = INSECURE,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._refused = refused
        self._credentials = credentials

    async def greet(self, address: str) -> Peer:
        """Greet the node at an address. The peer owns its channel.

        Raises ``TransferError``; ``PeerRefusedError`` for a node with which no transfer can work.
        """
        channel = self._credentials.channel(address, _CHANNEL)
        stub = self._credentials.stub(PrefillStub, channel)
        start = time.monotonic()
        try:
            reply = await stub.Hello(
                introduction(self._engine, self._identity), timeout=HELLO_SECONDS
            )
            self._refused.check(address, reply.node.epoch)
            peer = self.peer_from(address, reply, stub, channel)
            peer.link.add_round_trip(time.monotonic() - start)
            return peer
        except grpc.aio.AioRpcError as error:
            await channel.close(grace=0)
            raise self._explain(address, error) from None
        except BaseException:
            await channel.close(grace=0)
            raise

    def _explain(self, address: str, error: grpc.aio.AioRpcError) -> TransferError:
        details = error.details()
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            return PeerRefusedError(f"{address}: {details}")
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            full = f"{address} has no place for this node: {details}"
            return TransferError(full, cause=Cause.NO_PLACE)
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return TransferError(f"{address} refuses this node: {details}", cause=Cause.REFUSED)
        reason = f"{address} does not answer: {self._credentials.explain(error)}"
        return TransferError(reason, cause=Cause.PEER_LOST)

    def peer_from(
        self, address: str, reply: pb.HelloReply, stub: PrefillAsyncStub, channel: grpc.aio.Channel
    ) -> Peer:
        """The peer described by a reply. Raises ``TransferError`` for an invalid reply."""
        heads = self._engine.kv_heads(len(reply.ranks))
        if not 0 < reply.lease_seconds < math.inf:  # also rejects NaN
            raise TransferError(
                f"{address}: lease_seconds is {reply.lease_seconds}; it must be positive and finite"
            )
        # Both nodes must encrypt or neither: KV must not be sent in the clear by accident.
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
            # A node that does not announce a weight format keeps KV in the dtype of its weights.
            weight_format=reply.node.weight_format or reply.node.kv_dtype,
        )

    async def ping(self, address: str, request: pb.LiveRequest) -> float:
        """Seconds that a node takes to reply to a small request; 0 if it does not reply."""
        start = time.monotonic()
        async with self._credentials.channel(address, _CHANNEL) as channel:
            try:
                stub = self._credentials.stub(PrefillStub, channel)
                await stub.Live(request, timeout=ENDED_SECONDS)
            except grpc.aio.AioRpcError:
                return 0.0
        return time.monotonic() - start

    async def has_ended(self, candidate: pb.PrefillCandidate) -> bool:
        """True if nothing listens at the address, or another start of the process does.

        A process that does not reply may only be stopped or disconnected, so it has not ended.
        """
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
