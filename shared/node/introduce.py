"""Introduces a prefill node that does not join by itself to a router, when both have started."""

from __future__ import annotations

import time

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.tandem_pb2_grpc import PrefillStub, RegistryStub
from ..errors import PeerRefusedError, UnavailableError

CALL_SECONDS = 2.0
RETRY_SECONDS = 0.2


def introduce(address: str, registry: str, deadline: float) -> None:
    """Ask the node behind ``address`` what it is, and the router behind ``registry`` to take it.

    Asks until ``deadline``, by the monotonic clock. Raises ``UnavailableError`` when no prefill
    node answers there, ``PeerRefusedError`` when it runs another model than the router's nodes.
    """
    status = _await_status(address, deadline)
    request = pb.JoinRequest(
        node_id=status.node_id,
        epoch=status.epoch,
        role=status.role,
        address=address,
        model=status.model,
        load=status.load,
        version=status.version,
    )
    with grpc.insecure_channel(registry) as channel:
        try:
            RegistryStub(channel).Join(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise PeerRefusedError(f"{address} is refused: {error.details()}") from None


def _await_status(address: str, deadline: float) -> pb.StatusReply:
    with grpc.insecure_channel(address) as channel:
        while True:
            try:
                return PrefillStub(channel).Status(pb.StatusRequest(), timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                if time.monotonic() >= deadline:
                    why = (error.details() or error.code().name).partition(";")[0]
                    raise UnavailableError(f"no prefill node answers at {address}: {why}") from None
            time.sleep(RETRY_SECONDS)
