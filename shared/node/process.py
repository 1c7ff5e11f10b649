"""The life of a node's head process: load, listen, join, serve, drain, exit.

Both kinds of node are a ``NodeRole`` put into this frame, which may be changed while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.roles import role_name
from ..config import EngineConfig, HandoffConfig, NodeConfig
from ..engine.start import NodeEngine, NodeIdentity, start_engine
from ..errors import StartupError, UsageError
from ..handoff.carriers.names import NIXL
from ..handoff.carriers.nixl.agent import check_installed
from ..handoff.epoch import new_epoch
from ..handoff.inbox import Inbox
from ..models.fingerprint import fingerprint_text
from ..process.probe import ProbeServer
from ..process.signals import catch_signals
from ..security.credentials import INSECURE, Credentials, check_exposure, is_loopback
from ..security.token_interceptor import TokenInterceptor
from ..telemetry.process_metrics import ProcessMetrics
from ..telemetry.stats_line import log_rates
from ..telemetry.tracing import NO_TRACER, Tracer
from ..unix_sockets import UNIX, folder_of
from ..version import version
from .metrics import NodeMetrics
from .registration import Registration
from .role_switch import POLL_SECONDS, NodeRole, RoleSwitch

log = logging.getLogger("tandem.node")

_SERVER_OPTIONS = [
    # Without this a second process could share the port and take half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client that is cut off without a word must not hold its request to the last token.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1500),
    ("grpc.http2.max_pings_without_data", 0),
]


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """What a role is given to work with."""

    engine: NodeEngine
    identity: NodeIdentity
    inbox: Inbox
    metrics: NodeMetrics
    handoff: HandoffConfig
    status: Callable[[], pb.StatusReply]
    tracer: Tracer
    credentials: Credentials = INSECURE


async def run_node(
    roles: Sequence[NodeRole],
    engine_config: EngineConfig,
    handoff: HandoffConfig,
    node: NodeConfig,
    credentials: Credentials = INSECURE,
    *,
    on_ready: Callable[[str], None] = lambda address: None,
    tracer: Tracer = NO_TRACER,
) -> None:
    """Run until SIGTERM or SIGINT, in the first of ``roles`` until a router asks for another.

    Raises ``StartupError`` when it cannot start, or when the ranks are lost: a supervisor starts
    the node again.
    """
    check_carrier(handoff)
    # A wrong address is refused before anything starts.
    routers, _ = node.routers, node.advertised
    handoff.kv_advertised(engine_config.world_size - 1)
    cast = RoleSwitch(roles if routers else roles[:1])
    listens = {"--host": node.host} | ({"--kv-host": handoff.kv_host} if cast.listens else {})
    check_exposure(credentials, handoff.insecure, listens)
    identity = NodeIdentity(named(node, role_name(cast.role)).node_id or "", new_epoch())
    life = _Shutdown()
    catch_signals(lambda: life.drain(node.drain_timeout))
    # A taken port is known before the model is loaded, and the probes answer meanwhile.
    gate = TokenInterceptor(credentials, "tandem_calls_refused")
    server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=(gate,))
    port = credentials.bind(server, node.host, node.port, "the control plane")
    meets = folder_of(node.host)
    address = node.host if meets else f"{_visible(node.host)}:{port}"
    probe = ProbeServer()
    health = await probe.start("127.0.0.1" if meets else node.host, node.health_port)
    try:
        async with _engine(engine_config, handoff, identity, cast, life, credentials) as (
            engine,
            inbox,
        ):
            metrics = NodeMetrics(engine.core, inbox.stats, identity.node_id)
            metrics.registry.register(gate.refused)
            described = _Description(cast, engine, identity, metrics, address, node)
            frame = NodeProcess(
                engine, identity, inbox, metrics, handoff, described.status, tracer, credentials
            )
            cast.register(server, frame)
            await server.start()
            registrations = _registrations(routers, described, metrics, life, credentials)
            described.registrations = registrations
            loops = [engine.core.run(), *cast.background(), *(r.run() for r in registrations)]
            loops.append(_change_roles(life, cast, described, registrations))
            loops.append(ProcessMetrics(metrics.registry, credentials).watch())
            loops.append(log_rates(node.stats_interval, metrics.work, log))
            tasks = [asyncio.create_task(loop) for loop in loops]
            described.ready = True
            probe.show(lambda: described.has_work_to_come, metrics.text)
            log.info("%s is ready on %s, probes on port %d", identity.node_id, address, health)
            on_ready(address)
            try:
                await _until(life.stop, tasks)
                described.ready, described.draining = False, True
                await _drain(cast, registrations, life)
            finally:
                await server.stop(grace=0.5)
                await cast.close()
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


def _registrations(
    routers: Sequence[str],
    described: _Description,
    metrics: NodeMetrics,
    life: _Shutdown,
    credentials: Credentials,
) -> list[Registration]:
    return [
        Registration(
            router,
            described.join,
            life.drain,
            credentials,
            prefixes=metrics.prefixes,
            on_role=life.play,
        )
        for router in routers
    ]


class _Shutdown:
    """When the node is to end, and why if not because it was told to; and which role it is to
    play until then."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.lost = ""
        self._deadline = inf
        self.role_asked = asyncio.Event()
        self.role: pb.Role = pb.ROLE_UNSPECIFIED

    def drain(self, seconds: float | None) -> None:
        """End once running requests have ended, or after ``seconds``; ``None``: no limit. Of
        several limits, the earliest counts."""
        if seconds is not None:
            self._deadline = min(self._deadline, time.monotonic() + seconds)
        self.stop.set()

    def end(self, reason: str) -> None:
        """End at once, with an error: the ranks are lost. The first reason counts."""
        self.lost = self.lost or reason
        self.drain(0.0)

    @property
    def expired(self) -> bool:
        """Running requests have no time left."""
        return time.monotonic() >= self._deadline

    def play(self, role: pb.Role) -> None:
        """A router's operator asks for this role."""
        self.role = role
        self.role_asked.set()


class _StoppedError(Exception):
    """A signal came before the node could serve."""


class _Description:
    """What this node says of itself, to a router that it joins and to whoever asks."""

    def __init__(
        self,
        cast: RoleSwitch,
        engine: NodeEngine,
        identity: NodeIdentity,
        metrics: NodeMetrics,
        address: str,
        node: NodeConfig,
    ) -> None:
        self.ready = False
        self.draining = False
        self.registrations: list[Registration] = []
        self._cast = cast
        self._identity = identity
        self._metrics = metrics
        self._address = node.advertised or address
        self._card = pb.ModelCard(
            name=engine.name,
            path=str(engine.folder),
            fingerprint=fingerprint_text(engine.fingerprint),
            max_model_len=engine.resolved.max_model_len,
            vocab_size=engine.spec.vocab_size,
            eos_token_ids=engine.spec.eos_token_ids,
        )

    @property
    def has_work_to_come(self) -> bool:
        """It takes work, and a router that gives some has it; without --join, others ask it."""
        joined = not self.registrations or any(each.joined for each in self.registrations)
        return self.ready and joined

    def join(self) -> pb.JoinRequest:
        return pb.JoinRequest(
            node_id=self._identity.node_id,
            epoch=self._identity.epoch,
            role=self._cast.role,
            address=self._address,
            model=self._card,
            load=self._metrics.load(),
            version=version(),
        )

    def status(self) -> pb.StatusReply:
        return pb.StatusReply(
            node_id=self._identity.node_id,
            epoch=self._identity.epoch,
            role=self._cast.role,
            ready=self.ready,
            draining=self.draining,
            load=self._metrics.load(),
            model=self._card,
            version=version(),
        )


@contextlib.asynccontextmanager
async def _engine(
    config: EngineConfig,
    handoff: HandoffConfig,
    identity: NodeIdentity,
    cast: RoleSwitch,
    life: _Shutdown,
    credentials: Credentials,
) -> AsyncIterator[tuple[NodeEngine, Inbox]]:
    """The engine and its inbox, which need each other. Raises ``_StoppedError``."""
    # The inbox comes first: a rank's data plane reports as soon as it runs, and is told something
    # only once the engine is here.
    engines: list[NodeEngine] = []
    inbox = Inbox(
        lambda rank, data: engines[0].ranks.send_data(rank, data),
        life.end,
        max_peers=handoff.max_peers,
    )
    engine = await _unless(
        life.stop,
        start_engine(
            config,
            identity,
            handoff=handoff,
            listen=cast.listens,
            curve=credentials.encrypted,
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


async def _change_roles(
    life: _Shutdown, cast: RoleSwitch, described: _Description, registrations: list[Registration]
) -> None:
    """Until the node is to end: play the role that it is asked to."""
    while not life.stop.is_set():
        await life.role_asked.wait()
        life.role_asked.clear()
        wanted = life.role
        if wanted == cast.role or not cast.can_play(wanted):
            continue
        log.info("this node finishes what it has, to go on as a %s node", role_name(wanted))
        described.ready, described.draining = False, True
        for registration in registrations:
            registration.draining = True
        await cast.change(wanted)
        if not life.stop.is_set():
            for registration in registrations:
                registration.draining = False
            described.ready, described.draining = True, False
            log.info("this is a %s node now", role_name(wanted))


async def _drain(cast: RoleSwitch, registrations: list[Registration], life: _Shutdown) -> None:
    """Refuse new work and let the old finish, as long as ``life`` allows."""
    cast.drain()
    for registration in registrations:
        registration.draining = True
    begun = time.monotonic()
    while cast.busy and not life.expired:  # noqa: ASYNC110 - requests end in many places
        await asyncio.sleep(POLL_SECONDS)
    seconds = time.monotonic() - begun
    if cast.busy and not life.lost:
        log.warning("drained for %.1f s; what still runs is cut off", seconds)
        cast.cut_off()
    elif not life.lost:
        log.info("drained in %.1f s", seconds)


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


def _visible(host: str) -> str:
    """What others call a node that listens on ``host``, unless --advertise says it."""
    visible = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"[{visible}]" if ":" in visible else visible


def named(node: NodeConfig, kind: str) -> NodeConfig:
    """The same with a name, if it had none."""
    made_up = f"{kind}-{socket.gethostname()}-{secrets.token_hex(3)}"
    return replace(node, node_id=node.node_id or made_up)


def with_host(handoff: HandoffConfig, host: str) -> HandoffConfig:
    """The data plane listens where the control plane does, unless it was told otherwise."""
    if folder_of(host):
        return replace(handoff, kv_host=f"{UNIX}{folder_of(host)}")
    if is_loopback(handoff.kv_host) and not is_loopback(host):
        return replace(handoff, kv_host=host)
    return handoff
