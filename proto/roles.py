"""What a node's roles are called in commands, logs and metrics."""

from __future__ import annotations

from . import tandem_pb2 as pb

ROLES: dict[pb.Role, str] = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}


def role_name(role: pb.Role) -> str:
    """``?`` for one that this version does not know."""
    return ROLES.get(role, "?")
