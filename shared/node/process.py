"""A node's head process: load, listen, join, serve, drain, exit.

The process is the same for both kinds of node; they differ in their ``NodeRole``, which can be
switched while the process runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.capabilities import CAPABILITIES
from ...proto.roles import role_name
from ..config import EngineConfig, HandoffConfig, NodeConfig
from ..engine.other_hosts import OtherHosts
from ..engine.start import DataPlaneOptions, NodeEngine, NodeIdentity, start_engine
from ..errors import StartupError, TandemError
from ..handoff.carriers import kinds as carriers
from ..handoff.inbox import Inbox
from ..handoff.lease import new_epoch
from ..host_port import is_loopback, join_host_port
from ..models.fingerprint import fingerprint_text
from ..process.open_files import room_for_connections, warn_of_few_connections
from ..process.probe import ProbeServer
from ..process.signals import catch_signals
from ..security.credentials import INSECURE, PINGED, Credentials, check_exposure, connection_limits
from ..security.several_hosts import check_hosts
from ..security.token_interceptor import TokenInterceptor
from ..telemetry.process_metrics import ProcessMetrics
from ..telemetry.stats_line import log_rates
from ..telemetry.tracing import NO_TRACER, Tracer
from ..unix_sockets import UNIX, folder_of
from ..version import version
from .announced_address import announced_address
from .metrics import NodeMetrics
from .other_hosts import other_hosts
from .registration import Registration
from .role import NodeProcess, NodeRole
from .role_switch import POLL_SECONDS, RoleSwitch

log = logging.getLogger("tandem.node")

_SERVER_OPTIONS = [
    # Otherwise a second process could share the port and receive half of the RPCs.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 16 << 20),
    *PINGED,
    # Requests of a client whose connection has died silently end within seconds.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1500),
    ("grpc.http2.max_pings_without_data", 0),
]


async def run_node(
    playable: Sequence[NodeRole],
    engine_config: EngineConfig,
    handoff: HandoffConfig,
    node: NodeConfig,
    credentials: Credentials = INSECURE,
    *,
    on_ready: Callable[[str], None] = lambda address: None,
    tracer: Tracer = NO_TRACER,
) -> None:
    """Run until a signal, in the first of the ``playable`` roles until a router requests another.

    Raises ``StartupError`` if the node cannot start or loses its ranks; a supervisor may then
    restart it.
    """
    carriers.check(handoff.carrier, insecure=handoff.insecure)
    # Invalid addresses are rejected before anything starts.
    routers, _ = node.routers, node.advertised
    await _check_reachable(node)
    handoff.kv_advertised(engine_config.world_size - 1)
    check_hosts(engine_config, handoff, credentials)
    roles = RoleSwitch(playable if routers else playable[:1])
    listens = {"--host": node.host} | ({"--kv-host": handoff.kv_host} if roles.listens else {})
    check_exposure(credentials, handoff.insecure, listens)
    identity = NodeIdentity(named(node, role_name(roles.role)).node_id or "", new_epoch())
    shutdown = _Shutdown()
    catch_signals(lambda: shutdown.drain(node.drain_timeout))
    front = await _Front.open(node, credentials)
    try:
        async with (
            other_hosts(
                engine_config,
                credentials,
                on_stop=lambda: shutdown.drain(node.drain_timeout),
                failure=lambda: shutdown.lost,
            ) as hosts,
            _engine(engine_config, handoff, identity, roles, shutdown, credentials, hosts) as (
                engine,
                inbox,
            ),
        ):
            metrics = NodeMetrics(engine.core, inbox.stats, identity.node_id, engine.name)
            metrics.registry.register(front.interceptor.refused)
            description = _Description(roles, engine, identity, metrics, front.address, node)
            process = NodeProcess(
                engine, identity, inbox, metrics, handoff, description.status, tracer, credentials
            )
            description.registrations = [
                Registration(
                    router,
                    description.join,
                    shutdown.drain,
                    credentials,
                    prefixes=metrics.prefixes,
                    on_role=shutdown.play,
                    announce=_announcer(node, front, router),
                    failure=lambda: shutdown.lost,
                )
                for router in routers
            ]
            await _serve(process, roles, description, shutdown, front, node, on_ready)
    except _StoppedError:
        log.info("stopped while the model was loading")
    finally:
        await front.close()
    if shutdown.lost:
        raise StartupError(shutdown.lost)


async def _serve(
    process: NodeProcess,
    roles: RoleSwitch,
    description: _Description,
    shutdown: _Shutdown,
    front: _Front,
    node: NodeConfig,
    on_ready: Callable[[str], None],
) -> None:
    """Register the roles, run the background loops, and drain at the requested end."""
    metrics, registrations = process.metrics, description.registrations
    roles.register(front.server, process)
    await front.server.start()
    loops = [
        process.engine.core.run(),
        *roles.background(),
        *(registration.run() for registration in registrations),
        _change_roles(shutdown, roles, description, registrations),
        ProcessMetrics(metrics.registry, process.credentials).watch(),
        log_rates(node.stats_interval, metrics.work, log),
    ]
    tasks = [asyncio.create_task(loop) for loop in loops]
    description.ready = True
    front.probe.show(description.unready, metrics.text)
    name = process.identity.node_id
    log.info("%s listens on %s, probes on port %d", name, front.address, front.probe_port)
    on_ready(front.address)
    try:
        await _until(shutdown.stop, tasks)
        description.ready, description.draining = False, True
        await _drain(roles, registrations, shutdown)
    except Exception as error:
        shutdown.lost = shutdown.lost or f"it failed: {error!r}"  # sent to routers on leaving
        raise
    finally:
        await front.server.stop(grace=0.5)
        await roles.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Front:
    """The listening side of a node: control plane and probes.

    Ports are bound before the model is loaded, so that a port in use is reported at once and probes
    work during the load.
    """

    server: grpc.aio.Server
    interceptor: TokenInterceptor
    probe: ProbeServer
    address: str
    port: int
    probe_port: int

    @classmethod
    async def open(cls, node: NodeConfig, credentials: Credentials) -> _Front:
        """Bind the ports. Raises ``StartupError`` if one is in use."""
        interceptor = TokenInterceptor(credentials, "tandem_requests_refused")
        room = room_for_connections(node.max_connections)
        warn_of_few_connections(node.max_connections, room)
        options = [*_SERVER_OPTIONS, *connection_limits(room)]
        server = grpc.aio.server(options=options, interceptors=(interceptor,))
        port = credentials.bind(server, node.host, node.port, "the control plane")
        folder = folder_of(node.host)
        address = node.host if folder else join_host_port(node.host, port)
        probe = ProbeServer()
        host = "127.0.0.1" if folder else node.host
        probe_port = await probe.start(host, node.health_port)
        return cls(server, interceptor, probe, address, port, probe_port)

    async def close(self) -> None:
        await self.server.stop(grace=None)
        await self.probe.stop()


async def _check_reachable(node: NodeConfig) -> None:
    """Raise ``UsageError`` if a router could never reach this node. Routers whose names do not
    resolve yet are not checked."""
    if node.advertised or folder_of(node.host):
        return
    for router in node.routers:
        with contextlib.suppress(OSError):
            await announced_address(node.host, node.port, router)


def _announcer(node: NodeConfig, front: _Front, router: str) -> Callable[[], Awaitable[str]] | None:
    """A function that determines the address for a router; ``None`` if all get the same one."""
    if node.advertised or folder_of(node.host):
        return None
    return lambda: announced_address(node.host, front.port, router)


class _Shutdown:
    """The requested end of the node, with the reason if it has failed, and the requested role."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.lost = ""
        self._deadline = inf
        self.role_requested = asyncio.Event()
        self.role: pb.Role = pb.ROLE_UNSPECIFIED

    def drain(self, seconds: float | None) -> None:
        """End after the running requests, or after ``seconds`` (``None``: no limit). The earliest
        of several limits applies."""
        if seconds is not None:
            self._deadline = min(self._deadline, time.monotonic() + seconds)
        self.stop.set()

    def end(self, reason: str) -> None:
        """End at once with an error, because the ranks are lost. The first reason counts."""
        self.lost = self.lost or reason
        self.drain(0.0)

    @property
    def expired(self) -> bool:
        """True once the time limit of running requests has passed."""
        return time.monotonic() >= self._deadline

    def play(self, role: pb.Role) -> None:
        """Request a role, by command of a router's operator."""
        self.role = role
        self.role_requested.set()


class _StoppedError(TandemError):
    """A signal arrived before the node could serve."""


class _Description:
    """This node's description of itself, for routers and for status RPCs."""

    def __init__(
        self,
        roles: RoleSwitch,
        engine: NodeEngine,
        identity: NodeIdentity,
        metrics: NodeMetrics,
        address: str,
        node: NodeConfig,
    ) -> None:
        self.ready = False
        self.draining = False
        self.registrations: list[Registration] = []
        self._roles = roles
        self._identity = identity
        self._metrics = metrics
        self._address = node.advertised or address
        self._card = pb.ModelCard(
            name=engine.name,
            path=str(engine.model_path),
            fingerprint=fingerprint_text(engine.fingerprint),
            max_model_len=engine.resolved.max_model_len,
            vocab_size=engine.spec.vocab_size,
            eos_token_ids=engine.spec.eos_token_ids,
            scoring=engine.scoring or "",
            labels=() if engine.spec.classifier is None else engine.spec.classifier.labels,
        )

    def unready(self) -> str:
        """The reason why the node can get no requests; empty if it accepts them and some router can
        send them, or if there is no ``--join``."""
        if not self.ready:
            return "draining" if self.draining else "starting"
        if not self.registrations or not all(each.problem for each in self.registrations):
            return ""
        return "; ".join(f"router {each.router}: {each.problem}" for each in self.registrations)

    def join(self) -> pb.JoinRequest:
        return pb.JoinRequest(
            node_id=self._identity.node_id,
            epoch=self._identity.epoch,
            role=self._roles.role,
            address=self._address,
            model=self._card,
            load=self._metrics.load(),
            version=version(),
            capabilities=sorted(CAPABILITIES),
        )

    def status(self) -> pb.StatusReply:
        return pb.StatusReply(
            node_id=self._identity.node_id,
            epoch=self._identity.epoch,
            role=self._roles.role,
            ready=self.ready,
            draining=self.draining,
            load=self._metrics.load(),
            model=self._card,
            version=version(),
            capabilities=sorted(CAPABILITIES),
        )


@contextlib.asynccontextmanager
async def _engine(
    config: EngineConfig,
    handoff: HandoffConfig,
    identity: NodeIdentity,
    roles: RoleSwitch,
    shutdown: _Shutdown,
    credentials: Credentials,
    hosts: OtherHosts | None,
) -> AsyncIterator[tuple[NodeEngine, Inbox]]:
    """The engine and its inbox, which depend on each other. Raises ``_StoppedError``."""
    # The inbox comes first: data planes report as soon as they run, but commands to them are sent
    # only after the engine exists.
    engines: list[NodeEngine] = []
    inbox = Inbox(
        lambda rank, command: engines[0].ranks.send_command(rank, command),
        shutdown.end,
        max_peers=handoff.max_peers,
    )
    engine = await _unless(
        shutdown.stop,
        start_engine(
            config,
            identity,
            data_plane=DataPlaneOptions(
                handoff=handoff, listen=roles.listens, curve=credentials.encrypted
            ),
            hosts=hosts,
            on_event=inbox.on_event,
            on_lost=shutdown.end,
        ),
    )
    engines.append(engine)
    try:
        yield engine, inbox
    finally:
        await engine.ranks.stop()


async def _unless(stop: asyncio.Event, start: Coroutine[Any, Any, NodeEngine]) -> NodeEngine:
    """Await ``start``; cancel it, with its cleanup, if ``stop`` is set first."""
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
    """Wait for ``stop``. An error in a background loop is a bug and ends the node."""
    stopped = asyncio.create_task(stop.wait())
    watched: set[asyncio.Task[Any]] = {stopped, *tasks}
    try:
        while not stopped.done():
            done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()
    finally:
        stopped.cancel()


async def _change_roles(
    shutdown: _Shutdown,
    roles: RoleSwitch,
    description: _Description,
    registrations: list[Registration],
) -> None:
    """Switch roles on request, until the node ends."""
    while not shutdown.stop.is_set():
        await shutdown.role_requested.wait()
        shutdown.role_requested.clear()
        role = shutdown.role
        if role == roles.role or not roles.can_play(role):
            continue
        log.info("this node finishes its requests, then becomes a %s node", role_name(role))
        description.ready, description.draining = False, True
        for registration in registrations:
            registration.draining = True
        await roles.change(role)
        if not shutdown.stop.is_set():
            for registration in registrations:
                registration.draining = False
            description.ready, description.draining = True, False
            log.info("this node is now a %s node", role_name(role))


async def _drain(roles: RoleSwitch, registrations: list[Registration], shutdown: _Shutdown) -> None:
    """Reject new requests, and let running ones finish within the limit."""
    roles.drain()
    for registration in registrations:
        registration.draining = True
    start = time.monotonic()
    while roles.busy and not shutdown.expired:  # noqa: ASYNC110 - requests end in many places
        await asyncio.sleep(POLL_SECONDS)
    seconds = time.monotonic() - start
    if roles.busy and not shutdown.lost:
        log.warning("drained for %.1f s; the requests that still run are cut off", seconds)
        roles.cut_off()
    elif not shutdown.lost:
        log.info("drained in %.1f s", seconds)


def named(node: NodeConfig, kind: str) -> NodeConfig:
    """The configuration, with a generated name if it has none."""
    generated = f"{kind}-{socket.gethostname()}-{secrets.token_hex(3)}"
    return replace(node, node_id=node.node_id or generated)


def with_host(handoff: HandoffConfig, host: str) -> HandoffConfig:
    """The configuration with the data plane on the control plane's ``host``, unless ``kv_host`` is
    set."""
    if folder_of(host):
        return replace(handoff, kv_host=f"{UNIX}{folder_of(host)}")
    if is_loopback(handoff.kv_host) and not is_loopback(host):
        return replace(handoff, kv_host=host)
    return handoff
