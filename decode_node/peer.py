"""A prefill node that was greeted."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import grpc

from ..proto import tandem_pb2 as pb
from ..proto.tandem_pb2_grpc import PrefillStub
from ..shared.handoff.lease import LeaseTrust


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """One start of a prefill node: where its control and data planes are, and what it holds."""

    address: str
    node_id: str
    epoch: int
    endpoints: tuple[tuple[str, str], ...]  # bulk and control of each rank
    stub: PrefillStub
    channel: grpc.aio.Channel
    trust: LeaseTrust


def endpoints_of(ranks: list[pb.RankEndpoint], address: str) -> tuple[tuple[str, str], ...]:
    """Where the ranks of the node at ``address`` (host:port of its control plane) listen."""
    host = address.rpartition(":")[0]
    return tuple((reachable(rank.bulk, host), reachable(rank.control, host)) for rank in ranks)


def reachable(endpoint: str, host: str) -> str:
    """A wildcard address means: the host that the control plane was reached at."""
    parts = urlsplit(endpoint)
    if parts.hostname in ("0.0.0.0", "*", None, "::"):
        return f"tcp://{host}:{parts.port}"
    return endpoint
