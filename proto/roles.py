"""Names of the roles of nodes, for commands, logs and metrics."""

from __future__ import annotations

from . import tandem_pb2 as pb

ROLES: dict[pb.Role, str] = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}


def role_name(role: pb.Role) -> str:
    """The name of a role; ``?`` for one that this version does not know."""
    return ROLES.get(role, "?")
