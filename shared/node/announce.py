"""Registration of a prefill node that does not join a router itself."""

from __future__ import annotations

import time

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.tandem_pb2_grpc import PrefillStub, RegistryStub
from ..errors import PeerRefusedError, UnavailableError
from ..security.credentials import Credentials

RPC_SECONDS = 2.0
RETRY_SECONDS = 0.2


def announce_to_router(
    address: str, registry: str, deadline: float, credentials: Credentials
) -> None:
    """Query the node at ``address`` and join it to the router at ``registry`` on its behalf.

    Retries until ``deadline`` (monotonic). Raises ``UnavailableError`` if no prefill node replies,
    ``PeerRefusedError`` if the router rejects its model or the node rejects the cluster token.
    """
    status = _await_status(address, deadline, credentials)
    request = pb.JoinRequest(
        node_id=status.node_id,
        epoch=status.epoch,
        role=status.role,
        address=address,
        model=status.model,
        load=status.load,
        version=status.version,
        capabilities=status.capabilities,
    )
    with credentials.blocking_channel(registry) as channel:
        try:
            credentials.stub(RegistryStub, channel).Join(request, timeout=RPC_SECONDS)
        except grpc.RpcError as error:
            raise PeerRefusedError(
                f"the router rejects {address}: {credentials.explain(error)}"
            ) from None


def _await_status(address: str, deadline: float, credentials: Credentials) -> pb.StatusReply:
    with credentials.blocking_channel(address) as channel:
        stub = credentials.stub(PrefillStub, channel)
        while True:
            try:
                status: pb.StatusReply = stub.Status(pb.StatusRequest(), timeout=RPC_SECONDS)
                return status
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    raise PeerRefusedError(
                        f"{address} rejects this command: {error.details()}"
                    ) from None
                if time.monotonic() >= deadline:
                    why = credentials.explain(error)
                    raise UnavailableError(f"no prefill node answers at {address}: {why}") from None
            time.sleep(RETRY_SECONDS)
