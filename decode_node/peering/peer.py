"""State of a greeted prefill node, and errors of RPCs to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import grpc

from ...proto import tandem_pb2 as pb
from ...shared.causes import Cause
from ...shared.errors import TransferError
from ...shared.handoff.carriers.transport import Endpoints
from ...shared.handoff.lease import LeaseTrust
from ...shared.handoff.wire.head_parts import HeadPart
from ...shared.host_port import is_wildcard, join_host_port, split_host_port
from ...shared.unix_sockets import folder_of, kv_endpoint_of
from .link import MeasuredLink

if TYPE_CHECKING:
    from ...proto.tandem_pb2_grpc import PrefillAsyncStub


class PeerLostError(TransferError):
    """The process at the address is gone or was replaced: greet again."""

    cause = Cause.PEER_LOST


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """One start of a prefill node's process: its planes, its leases, its measured link."""

    address: str
    node_id: str
    epoch: int
    endpoints: tuple[Endpoints, ...]  # by rank
    kv_dtype: str
    parts: list[HeadPart]  # which rank there sends which heads to which rank here
    stub: PrefillAsyncStub
    channel: grpc.aio.Channel
    trust: LeaseTrust
    link: MeasuredLink = field(default_factory=MeasuredLink)
    weight_format: str = ""


# Statuses of a healthy peer that does not take the request.
_REJECTIONS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Cause.BUSY,
    grpc.StatusCode.INVALID_ARGUMENT: Cause.REFUSED,
}


@contextlib.contextmanager
def rpc_errors() -> Iterator[None]:
    """Translate gRPC's errors: ``TransferError`` if the peer rejected the request, else
    ``PeerLostError``."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        reason = f"{error.code().name}: {error.details()}"
        if error.code() in _REJECTIONS:
            raise TransferError(reason, cause=_REJECTIONS[error.code()]) from None
        raise PeerLostError(reason) from None
    except grpc.aio.UsageError:
        raise PeerLostError("the connection was already closed") from None
    except asyncio.CancelledError:
        # gRPC raises this too if another transfer found the peer dead and closed the channel.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PeerLostError("the connection was closed") from None


def endpoints_of(reply: pb.HelloReply, address: str) -> tuple[Endpoints, ...]:
    """The data-plane endpoints of the node with the control plane ``address``.

    Raises ``TransferError`` if one is invalid.
    """
    keys = list(reply.node.curve_keys) or [""] * len(reply.ranks)
    try:
        return tuple(
            Endpoints(reachable(rank.bulk, address), reachable(rank.control, address), key)
            for rank, key in zip(reply.ranks, keys, strict=True)
        )
    except ValueError as error:
        raise TransferError(f"{address} announced an invalid endpoint: {error}") from None


def reachable(endpoint: str, address: str) -> str:
    """The URL at which to reach an endpoint announced by the node at ``address``: a wildcard is
    replaced by that address's host. Raises ``ValueError``.

    A node must not direct us to local sockets, unless its own address is one in a shared folder.
    """
    folder = folder_of(address)
    if folder:
        return kv_endpoint_of(endpoint, folder)
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or parts.port is None:
        raise ValueError(f"{endpoint[:100]!r} is not tcp://host:port")
    if is_wildcard(parts.hostname or ""):
        return f"tcp://{join_host_port(split_host_port(address)[0], parts.port)}"
    return endpoint
