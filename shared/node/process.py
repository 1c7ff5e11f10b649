"""The life of a node's head process: load, listen, join, serve, drain, exit.

Both kinds of node are a ``NodeRole`` put into this frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc

from ...proto import tandem_pb2 as pb
from ..config import EngineConfig, HandoffConfig, NodeConfig
from ..errors import StartupError, UsageError
from ..handoff.carrier_names import NIXL
from ..handoff.epoch import new_epoch
from ..handoff.inbox import Inbox
from ..handoff.nixl_agent import check_installed
from .engine import NodeEngine, NodeIdentity, fingerprint_text, start_engine
from .metrics import NodeMetrics
from .probe import ProbeServer
from .registration import Registration

log = logging.getLogger("tandem.node")

_SERVER_OPTIONS = [
    # Without this a second process could share the port and take half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
]


class NodeRole(Protocol):
    """What makes a head process a prefill node or a decode node."""

    role: pb.Role
    listens: bool  # its ranks accept data-plane connections

    def register(self, server: grpc.aio.Server, frame: NodeFrame) -> None:
        """Add the services, and remember the frame."""

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """Loops that run as long as the node."""

    def drain(self) -> None:
        """Refuse new work."""

    @property
    def busy(self) -> bool:
        """Work is left that a drain waits for."""

    async def close(self) -> None:
        """Give back connections."""


@dataclass(frozen=True, slots=True)
class NodeFrame:
    """What a role is given to work with."""

    engine: NodeEngine
    identity: NodeIdentity
    inbox: Inbox
    metrics: NodeMetrics
    handoff: HandoffConfig
    status: Callable[[], pb.StatusReply]


async def run_node(
    role: NodeRole,
    engine_config: EngineConfig,
    handoff: HandoffConfig,
    node: NodeConfig,
    *,
    on_ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Run until SIGTERM or SIGINT. Raises ``StartupError`` when it cannot start, or when the ranks
    are lost: a supervisor starts the node again."""
    check_exposure(handoff, role.listens, node)
    check_carrier(handoff)
    routers = node.routers  # a wrong --join is refused before anything starts
    identity = NodeIdentity(node.node_id or _default_id(role), new_epoch())
    life = _Life()
    _catch_signals(life.stop)
    # A taken port is known before the model is loaded, and the probes answer meanwhile.
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    address = _bind(server, node.host, node.port)
    probe = ProbeServer()
    health = await probe.start(node.host, node.health_port)
    try:
        async with _engine(engine_config, handoff, identity, role, life) as (engine, inbox):
            metrics = NodeMetrics(engine.core, inbox.stats)
            described = _Description(role, engine, identity, metrics, address, node)
            role.register(
                server, NodeFrame(engine, identity, inbox, metrics, handoff, described.status)
            )
            await server.start()
            registrations = [
                Registration(router, described.join, metrics.samples, life.end, life.stop.set)
                for router in routers
            ]
            loops = [engine.core.run(), *role.background(), *(r.run() for r in registrations)]
            tasks = [asyncio.create_task(loop) for loop in loops]
            described.ready = True
            probe.show(lambda: described.ready, metrics.text)
            log.info("%s is ready on %s, probes on port %d", identity.node_id, address, health)
            on_ready(address)
            try:
                await _until(life.stop, tasks)
                described.ready, described.draining = False, True
                await _drain(role, registrations, 0.0 if life.lost else node.drain_timeout)
            finally:
                await server.stop(grace=0.5)
                await role.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    except _StoppedError:
        log.info("stopped while the model was loading")
    finally:
        await server.stop(grace=None)
        await probe.stop()
    if life.lost:
        raise StartupError(life.lost)


class _Life:
    """When the node is to end, and why if not because it was told to."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.lost = ""

    def end(self, reason: str) -> None:
        """The ranks are lost, or a router refuses this node; the first reason counts."""
        self.lost = self.lost or reason
        self.stop.set()


class _StoppedError(Exception):
    """A signal came before the node could serve."""


class _Description:
    """What this node says of itself, to a router that it joins and to whoever asks."""

    def __init__(
        self,
        role: NodeRole,
        engine: NodeEngine,
        identity: NodeIdentity,
        metrics: NodeMetrics,
        address: str,
        node: NodeConfig,
    ) -> None:
        self.ready = False
        self.draining = False
        self._role = role
        self._identity = identity
        self._metrics = metrics
        self._address = node.advertise or address
        self._card = pb.ModelCard(
            name=engine.name,
            path=str(engine.folder),
            fingerprint=fingerprint_text(engine.fingerprint),
            max_model_len=engine.resolved.max_model_len,
            vocab_size=engine.spec.vocab_size,
            eos_token_ids=engine.spec.eos_token_ids,
        )

    def join(self) -> pb.JoinRequest:
        return pb.JoinRequest(
            node_id=self._identity.node_id,
            epoch=self._identity.epoch,
            role=self._role.role,
            address=self._address,
            model=self._card,
            load=self._metrics.load(),
        )

    def status(self) -> pb.StatusReply:
        return pb.StatusReply(
            node_id=self._identity.node_id,
            epoch=self._identity.epoch,
            role=self._role.role,
            ready=self.ready,
            draining=self.draining,
            load=self._metrics.load(),
            model=self._card,
            metrics=self._metrics.samples(),
        )


@contextlib.asynccontextmanager
async def _engine(
    config: EngineConfig,
    handoff: HandoffConfig,
    identity: NodeIdentity,
    role: NodeRole,
    life: _Life,
) -> AsyncIterator[tuple[NodeEngine, Inbox]]:
    """The engine and its inbox, which need each other. Raises ``_StoppedError``."""
    # The inbox comes first: a rank's data plane reports as soon as it runs, and is told something
    # only once the engine is here.
    engines: list[NodeEngine] = []
    inbox = Inbox(lambda rank, data: engines[0].ranks.send_data(rank, data), life.end)
    engine = await _unless(
        life.stop,
        start_engine(
            config,
            identity,
            handoff=handoff,
            listen=role.listens,
            on_event=inbox.on_event,
            on_lost=life.end,
        ),
    )
    engines.append(engine)
    try:
        yield engine, inbox
    finally:
        await engine.ranks.stop()


async def _unless(stop: asyncio.Event, start: Coroutine[Any, Any, NodeEngine]) -> NodeEngine:
    """What ``start`` gives; when ``stop`` is set before, it is cancelled and has cleaned up."""
    starting = asyncio.create_task(start)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            raise _StoppedError
        return starting.result()
    finally:
        for task in (starting, stopped):
            task.cancel()
        await asyncio.gather(starting, stopped, return_exceptions=True)


async def _until(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Wait for a signal; a loop that ends with an error is a bug, and ends the node loudly."""
    stopped = asyncio.create_task(stop.wait())
    watched: set[asyncio.Task[Any]] = {stopped, *tasks}
    try:
        while not stopped.done():
            done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()
    finally:
        stopped.cancel()


async def _drain(role: NodeRole, registrations: list[Registration], seconds: float) -> None:
    """Refuse new work and let the old finish, for at most ``seconds``."""
    role.drain()
    for registration in registrations:
        registration.draining = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while role.busy:  # noqa: ASYNC110 - requests end in many places, drains are rare
                await asyncio.sleep(0.05)


def check_exposure(handoff: HandoffConfig, listens: bool, node: NodeConfig) -> None:
    """Raise ``UsageError`` when unprotected KV would be reachable from other machines unasked."""
    hosts = [("--host", node.host)] + ([("--kv-host", handoff.kv_host)] if listens else [])
    for flag, host in hosts:
        if not _loopback(host) and not handoff.insecure:
            raise UsageError(
                f"{flag} {host} is reachable from other machines, and the handoff is neither "
                f"encrypted nor authenticated; add --insecure if the network is trusted"
            )


def check_carrier(handoff: HandoffConfig) -> None:
    """Raise before a model is loaded for a carrier that cannot be."""
    if handoff.carrier != NIXL:
        return
    if not handoff.insecure:
        raise UsageError(
            "--carrier nixl listens on ports and addresses that the library chooses, and is "
            "neither encrypted nor authenticated; add --insecure if the network is trusted"
        )
    check_installed()


def _loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _bind(server: grpc.aio.Server, host: str, port: int) -> str:
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        bound = 0
    if not bound:
        raise StartupError(f"cannot listen on {host}:{port}: is the port taken? Choose another")
    visible = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"{visible}:{bound}"


def _catch_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def _default_id(role: NodeRole) -> str:
    kind = "prefill" if role.role == pb.ROLE_PREFILL else "decode"
    return f"{kind}-{socket.gethostname()}-{secrets.token_hex(3)}"


def with_host(handoff: HandoffConfig, host: str) -> HandoffConfig:
    """The data plane listens where the control plane does, unless it was told otherwise."""
    if _loopback(handoff.kv_host) and not _loopback(host):
        return replace(handoff, kv_host=host)
    return handoff
