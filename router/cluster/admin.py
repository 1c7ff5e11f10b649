"""An operator's commands to a router about its nodes, as a client of its registry."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from ...proto import tandem_pb2 as pb
from ...proto.roles import ROLES, role_name
from ...proto.tandem_pb2_grpc import RegistryStub
from ...shared.errors import RequestError, UnavailableError
from ...shared.security.credentials import INSECURE, Credentials
from .absence import told

RPC_SECONDS = 5.0
# The router has answered, and refuses.
_REFUSALS = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
)
# No answer; with any other status the router has answered.
_SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# Lines about nodes that are absent or cannot be called.
MAX_REMARKS = 64
HEADINGS = (
    "NODE", "ROLE", "STATE", "RUNNING", "WAITING", "QUEUED TOKENS", "FREE BLOCKS", "LINKS",
    "LEASES", "ADDRESS",
)  # fmt: skip


def list_nodes(registry: str, credentials: Credentials = INSECURE) -> pb.ListReply:
    """List the nodes of the router behind ``registry``. Raises ``UnavailableError``."""
    reply: pb.ListReply = _ask(
        registry, credentials, lambda stub: stub.List(pb.ListRequest(), timeout=RPC_SECONDS)
    )
    return reply


def can_serve(registry: str, credentials: Credentials = INSECURE) -> bool:
    """True if the router behind ``registry`` has a decode node that it can call. Raises
    ``UnavailableError``."""
    nodes = list_nodes(registry, credentials).nodes
    return any(
        node.role == pb.ROLE_DECODE and not node.draining and not node.unreachable for node in nodes
    )


def refusal_of(
    registry: str, addresses: Collection[str], credentials: Credentials = INSECURE
) -> str:
    """The reason why the router behind ``registry`` refuses one of the nodes at ``addresses``;
    empty if it refuses none. Raises ``UnavailableError``."""
    reply = list_nodes(registry, credentials)
    reasons = [node.reason for node in reply.absent if node.refused and node.address in addresses]
    return reasons[0] if reasons else ""


def drain_node(
    registry: str,
    node_id: str,
    credentials: Credentials = INSECURE,
    *,
    timeout: float | None = None,
) -> None:
    """Drain a node: it takes no more work, finishes what it has, and exits, after ``timeout``
    seconds at the latest.

    Raises ``RequestError`` if the router knows no such node or cannot send it a command,
    ``UnavailableError`` if no router answers.
    """
    request = pb.DrainRequest(node_id=node_id, timeout_seconds=timeout)
    _ask(registry, credentials, lambda stub: stub.Drain(request, timeout=RPC_SECONDS))


def set_role(
    registry: str,
    node_id: str,
    role: str,
    credentials: Credentials = INSECURE,
    *,
    force: bool = False,
) -> None:
    """Make a node finish what it has, and continue as a ``role`` node.

    ``force`` permits this for the last decode node. Raises like ``drain_node``, and
    ``RequestError`` for a node that has this role already or is draining.
    """
    wanted = next(number for number, name in ROLES.items() if name == role)
    request = pb.SetRoleRequest(node_id=node_id, role=wanted, force=force)
    _ask(registry, credentials, lambda stub: stub.SetRole(request, timeout=RPC_SECONDS))


def as_table(listed: pb.ListReply) -> str:
    """A table with one line for each node, then a line for each that cannot be called or is
    absent."""
    nodes = listed.nodes
    rows = [HEADINGS, *map(_row, nodes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    remarks = [
        *(f"{node.node_id}: {node.unreachable}" for node in nodes if node.unreachable),
        *(f"{role_name(n.role)} node {n.node_id} {told(n)}" for n in listed.absent),
    ]
    left_out = len(remarks) - MAX_REMARKS
    if left_out > 0:
        remarks = [*remarks[-MAX_REMARKS:], f"{left_out} more are left out"]
    return "\n".join([*lines, *([""] if remarks else []), *remarks])


def as_json(listed: pb.ListReply) -> str:
    """A JSON array of the nodes, with every field of the protocol."""
    nodes = [
        MessageToDict(
            node, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for node in listed.nodes
    ]
    return json.dumps(nodes, indent=2)


def _row(node: pb.NodeInfo) -> tuple[str, ...]:
    load = node.load
    return (
        node.node_id,
        role_name(node.role),
        _state(node),
        str(load.running),
        str(load.waiting),
        str(load.queued_prefill_tokens),
        f"{load.free_blocks}/{load.total_blocks}",
        str(load.links),
        str(load.leases),
        node.address,
    )


def _state(node: pb.NodeInfo) -> str:
    if node.next_role in ROLES:
        return f"to {role_name(node.next_role)}"
    if node.draining:
        return "draining"
    return "unreachable" if node.unreachable else "ready"


def _ask(registry: str, credentials: Credentials, rpc: Callable[[RegistryStub], Any]) -> Any:
    with credentials.blocking_channel(registry) as channel:
        try:
            return rpc(credentials.stub(RegistryStub, channel))
        except grpc.RpcError as error:
            if error.code() in _REFUSALS:
                raise RequestError(error.details() or "refused") from None
            if error.code() not in _SILENCE:
                raise UnavailableError(
                    f"the router at {registry} answered with {error.code().name}: {error.details()}"
                ) from None
            raise UnavailableError(
                f"no router answers at {registry}: {credentials.explain(error)}; --router is the "
                f"address of its registry"
            ) from None
