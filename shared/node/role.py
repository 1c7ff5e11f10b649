"""The interface of a node's role, and the parts of the head process that it uses."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from ...proto import tandem_pb2 as pb
from ..config import HandoffConfig
from ..engine.start import NodeEngine, NodeIdentity
from ..handoff.inbox import Inbox
from ..security.credentials import INSECURE, Credentials
from ..telemetry.tracing import Tracer
from .metrics import NodeMetrics


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """The parts of a head process that a role uses."""

    engine: NodeEngine
    identity: NodeIdentity
    inbox: Inbox
    metrics: NodeMetrics
    handoff: HandoffConfig
    status: Callable[[], pb.StatusReply]
    tracer: Tracer
    credentials: Credentials = INSECURE


class NodeRole(Protocol):
    """The part of a head process that differs between prefill and decode nodes."""

    role: pb.Role
    listens: bool  # whether its ranks accept data-plane connections

    def register(self, server: grpc.aio.Server, process: NodeProcess) -> None:
        """Add the services, and keep the process."""

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines that run as long as the node."""

    def admit(self) -> None:
        """Accept new requests again."""

    def drain(self) -> None:
        """Reject new requests."""

    @property
    def busy(self) -> bool:
        """True while a drain must wait for requests."""

    def cut_off(self) -> None:
        """End the running requests with an error that mentions the drain."""

    async def close(self) -> None:
        """Close connections; the role may become current again later."""
