"""An operator's commands about nodes, as a client of the router's registry."""

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

RPC_SECONDS = 5.0
# Statuses with which the router refuses a command.
_REFUSALS = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
)
# Statuses without a reply; any other is the router's own.
_NO_REPLY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# Lines about absent or unreachable nodes.
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
    """True if the router behind ``registry`` can reach a decode node. Raises
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

    Raises ``RequestError`` if the router has no such node or cannot send it a command,
    ``UnavailableError`` if no router replies.
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
    """Make a node finish its work and continue as a ``role`` node.

    ``force`` permits this for the last decode node. Raises like ``drain_node``, and
    ``RequestError`` for a node that already has this role or is draining.
    """
    number = next(each for each, name in ROLES.items() if name == role)
    request = pb.SetRoleRequest(node_id=node_id, role=number, force=force)
    _ask(registry, credentials, lambda stub: stub.SetRole(request, timeout=RPC_SECONDS))


def as_table(reply: pb.ListReply) -> str:
    """A table with a line for each node, then a line for each unreachable or absent node."""
    nodes = reply.nodes
    rows = [HEADINGS, *map(_row, nodes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    remarks = [
        *(f"{node.node_id}: {node.unreachable}" for node in nodes if node.unreachable),
        *(f"{role_name(n.role)} node {n.node_id} {describe_absence(n)}" for n in reply.absent),
    ]
    omitted = len(remarks) - MAX_REMARKS
    if omitted > 0:
        remarks = [*remarks[-MAX_REMARKS:], f"{omitted} more are left out"]
    return "\n".join([*lines, *([""] if remarks else []), *remarks])


def as_json(reply: pb.ListReply) -> str:
    """A JSON array of the nodes, with every field of the protocol."""
    nodes = [
        MessageToDict(
            node, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for node in reply.nodes
    ]
    return json.dumps(nodes, indent=2)


def describe_absence(node: pb.AbsentNode) -> str:
    """What happened to an absent node, to follow its name."""
    ago = f"{node.seconds_ago:.0f} s ago"
    if node.refused:
        return f"was rejected {ago}: {node.reason}"
    if node.failed:
        event = f"left {ago}: {node.reason}"
    else:
        event = f"{node.reason} and was dropped {ago} (it was at {node.address})"
    return f"{event}; it has returned since" if node.returned else event


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
            if error.code() not in _NO_REPLY:
                raise UnavailableError(
                    f"the router at {registry} replied with {error.code().name}: {error.details()}"
                ) from None
            raise UnavailableError(
                f"no router answers at {registry}: {credentials.explain(error)}; --router is the "
                f"address of its registry"
            ) from None
