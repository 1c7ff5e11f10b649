"""Limits of a gRPC server on its connections: the cost of strangers, before they are known."""

from __future__ import annotations

# A connection that has not greeted by then is closed; gRPC would keep it for two minutes.
HANDSHAKE_SECONDS = 10


def connection_limits(most: int) -> tuple[tuple[str, int], ...]:
    """Options of a server with at most ``most`` connections; further ones are closed at once.

    An idle connection takes some 12 KiB of memory and a descriptor.
    """
    return (
        ("grpc.max_allowed_incoming_connections", most),
        ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_SECONDS),
    )
