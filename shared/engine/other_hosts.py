"""The head's side of the other hosts of its node: launchers join it, and then their ranks.

A launcher's connection lasts as long as its host is part of the node. It reports how its ranks
ended, and kills them on request. Ranks have connections of their own, which the executor uses like
those of its local ranks.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from ..config import EngineConfig
from ..errors import StartupError, in_line
from ..handoff.wire.codec import VersionError
from ..host_port import join_host_port
from ..security.tls import server_context
from ..version import version, versions
from .channel import framed, read_message
from .join import (
    HANDSHAKE_SECONDS,
    REFUSAL,
    REPLY_BYTES,
    admission,
    greeting,
    set_options,
)
from .messages import (
    HeadEnds,
    HostAccepted,
    HostJoins,
    HostRefused,
    HostStops,
    JoinSecrets,
    KillRank,
    RankEnded,
    RankJoins,
    RankMessage,
    ToLauncher,
)

log = logging.getLogger("tandem.node")

# Connections that have not proved yet that they know the token. Ranks do within milliseconds, so
# the oldest of more is closed: strangers that only connect keep no rank out.
MAX_UNPROVED = 128
# A reason to refuse connections is logged at most once in this time: strangers must not fill the
# log.
QUIET_SECONDS = 10.0
# For a name that is not known yet, such as that of a pod which has just started.
NAME_SECONDS = 60.0
NAME_RETRY_SECONDS = 0.5
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class RemoteProcess:
    """A rank's process on another host, with what the executor uses of
    ``asyncio.subprocess.Process``."""

    def __init__(self, rank: int, host: Host) -> None:
        self._rank = rank
        self._host = host

    async def wait(self) -> int | None:
        """The exit status; ``None`` if the host itself is gone."""
        return await asyncio.shield(self._host.statuses[self._rank])

    def kill(self) -> None:
        self._host.send(KillRank(self._rank))


@dataclass(slots=True, eq=False)
class Host:
    """A host that has joined. ``statuses`` are those with which its ranks end."""

    about: HostJoins
    writer: asyncio.StreamWriter
    statuses: dict[int, asyncio.Future[int | None]] = field(default_factory=dict)
    connections: dict[int, asyncio.Future[Connection]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"node rank {self.about.node_rank} ({self.about.address})"

    def send(self, message: ToLauncher) -> None:
        if not self.writer.is_closing():
            self.writer.write(framed(message))


class OtherHosts:
    """The hosts ``1`` to ``nnodes - 1``. ``on_stop`` is called when one of them got a signal.

    A host is refused, and the wait for a right one continues, if it has another model or other
    numbers. Once all have joined, none can be replaced.
    """

    def __init__(
        self,
        config: EngineConfig,
        secrets: JoinSecrets,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._secrets = secrets
        self._on_stop = on_stop
        self._per_host = config.ranks_per_host
        self._hosts: dict[int, Host] = {}
        self._changed = asyncio.Event()
        self._fingerprint: asyncio.Future[dict[str, str]] = (
            asyncio.get_running_loop().create_future()
        )
        self._complete = False
        self._last_refusal = ""
        self._logged_at: dict[str, float] = {}  # by the reason of a refusal
        self._unproved: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ranks_per_host(self) -> int:
        return self._per_host

    @property
    def rendezvous(self) -> str:
        return self._config.rendezvous

    async def listen(self) -> None:
        """Listen at ``--master-addr``. Raises ``StartupError``."""
        secrets, config = self._secrets, self._config
        context: ssl.SSLContext | None = None
        if secrets.certificate:
            context = server_context(secrets.certificate, secrets.key, secrets.authority)
        deadline = asyncio.get_running_loop().time() + NAME_SECONDS
        while self._server is None:
            try:
                self._server = await self._bind(context)
            except OSError as error:
                is_late = asyncio.get_running_loop().time() >= deadline
                if not isinstance(error, socket.gaierror) or is_late:
                    raise StartupError(
                        f"cannot listen on {config.master} for the other hosts: "
                        f"{error.strerror or error}; --master-addr must be an address of host 0, "
                        f"which this is, and --master-port free there"
                    ) from None
                await asyncio.sleep(NAME_RETRY_SECONDS)

    async def _bind(self, context: ssl.SSLContext | None) -> asyncio.Server:
        return await asyncio.start_server(
            self._accept,
            self._config.master_addr,
            self._config.master_port,
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if context is not None else None,
        )

    async def join(self, fingerprint: dict[str, str]) -> list[Host]:
        """Wait for all hosts, which must have the model with this fingerprint, and have them start
        their ranks. Raises ``StartupError`` that names those which are missing."""
        self._fingerprint.set_result(fingerprint)
        numbers = range(1, self._config.nnodes)
        log.info("waiting at %s for the other hosts of --nnodes", self._config.master)
        try:
            async with asyncio.timeout(self._config.join_timeout):
                while len(self._hosts) < len(numbers):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = ", ".join(str(number) for number in numbers if number not in self._hosts)
            raise StartupError(
                f"node rank {missing} did not join at {self._config.master} within "
                f"{self._config.join_timeout:g} s; start the same command there with its "
                f"--node-rank, or raise --join-timeout"
                + (self._last_refusal and f" (the last connection: {self._last_refusal})")
            ) from None
        self._complete = True
        hosts = [self._hosts[number] for number in numbers]
        for host in hosts:
            host.send(HostAccepted())
        return hosts

    async def connection(self, rank: int, seconds: float) -> tuple[Host, RemoteProcess, Connection]:
        """The connection of a rank on another host. Raises ``StartupError``."""
        host = self._hosts[rank // self._per_host]
        try:
            async with asyncio.timeout(seconds):
                connection = await asyncio.shield(host.connections[rank])
        except TimeoutError:
            raise StartupError(
                f"rank {rank} of {host} did not connect within {seconds:g} s; see that host's log"
            ) from None
        return host, RemoteProcess(rank, host), connection

    async def close(self, reason: str) -> None:
        """End the other hosts; ``reason`` is empty unless the node has failed."""
        if self._server is not None:
            self._server.close()
        for host in self._hosts.values():
            host.send(HeadEnds(reason))
            host.writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._fingerprint.done():
            self._fingerprint.cancel()

    # ---- one connection ----------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Admit a launcher or a rank. A launcher's connection is served until it ends."""
        peer = writer.get_extra_info("peername")
        address = join_host_port(str(peer[0]), peer[1]) if peer else "a connection"
        is_rank = False
        try:
            message = await self._first_message(reader, writer)
            if isinstance(message, HostJoins):
                await self._serve_host(message, reader, writer)
            elif isinstance(message, RankJoins):
                is_rank = self._take(message.rank, (reader, writer))
        except VersionError:
            self._note_refusal(
                address,
                f"it has another version of Tandem than the head's {version()}; install the same "
                f"on all hosts",
            )
            # It cannot be decoded there either, but says so.
            writer.write(framed(HostRefused("the head has another version")))
        except (ValueError, StartupError) as error:
            self._note_refusal(address, str(error))
        except (asyncio.IncompleteReadError, OSError):
            pass  # it has gone
        finally:
            if not is_rank:
                writer.close()

    def _note_refusal(self, address: str, reason: str) -> None:
        self._last_refusal = f"{address} is refused: {reason}"
        now = asyncio.get_running_loop().time()
        if now - self._logged_at.get(reason, -QUIET_SECONDS) >= QUIET_SECONDS:
            self._logged_at[reason] = now
            log.warning("%s", self._last_refusal)

    async def _first_message(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> RankMessage:
        """The first message of a connection that has proved to know a token. Raises
        ``StartupError``, and like ``read_message``."""
        if len(self._unproved) >= MAX_UNPROVED:
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.transport.abort()
        self._unproved[writer] = None
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                set_options(writer.get_extra_info("socket"))
                await self._admit(reader, writer)
                return await read_message(reader)
        except TimeoutError:
            raise StartupError("it proves no cluster token in time") from None
        finally:
            self._unproved.pop(writer, None)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        challenge = greeting()
        writer.write(challenge)
        reply = await reader.readexactly(REPLY_BYTES)
        proof = admission(self._secrets.tokens, challenge, reply)
        writer.write(proof)
        if proof == REFUSAL:
            raise StartupError("it has another cluster token")

    def _take(self, rank: int, connection: Connection) -> bool:
        host = self._hosts.get(rank // self._per_host)
        waiting = host.connections.get(rank) if host is not None else None
        if not self._complete or waiting is None or waiting.done():
            raise StartupError(f"no rank {rank} is expected")
        waiting.set_result(connection)
        return True

    async def _serve_host(
        self, about: HostJoins, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Register a host until its connection ends."""
        if problem := await self._problem(about):
            writer.write(framed(HostRefused(problem)))
            raise StartupError(problem)
        first = about.node_rank * self._per_host
        host = Host(about, writer)
        loop = asyncio.get_running_loop()
        for rank in range(first, first + self._per_host):
            host.statuses[rank] = loop.create_future()
            host.connections[rank] = loop.create_future()
        self._hosts[about.node_rank] = host
        self._changed.set()
        log.info("%s has joined", host)
        try:
            while True:
                message = await read_message(reader)
                if isinstance(message, HostStops):
                    log.info("%s got a signal: the node drains", host)
                    self._on_stop()
                elif isinstance(message, RankEnded) and message.rank in host.statuses:
                    _settle(host, message.rank, message.status)
        finally:
            for rank in host.statuses:
                _settle(host, rank, None)
            if not self._complete:
                log.warning("%s has left before all hosts had joined", host)
                del self._hosts[about.node_rank]

    async def _problem(self, about: HostJoins) -> str:
        """The reason to refuse a host; empty if it fits."""
        config = self._config
        who = f"node rank {about.node_rank} ({about.address})"
        if about.nnodes != config.nnodes:
            return f"{who} has --nnodes {about.nnodes}, the head {config.nnodes}"
        if about.size != config.world_size:
            return f"{who} has --tensor-parallel-size {about.size}, the head {config.world_size}"
        if not 0 < about.node_rank < config.nnodes:
            return f"{who} is none of the hosts 1 to {config.nnodes - 1}"
        if about.versions != versions():
            return f"{who} has {about.versions}, the head {versions()}; install the same on all"
        fingerprint = await asyncio.shield(self._fingerprint)
        differing = sorted(
            key
            for key in fingerprint.keys() | about.fingerprint.keys()
            if fingerprint.get(key) != about.fingerprint.get(key)
        )
        if differing:
            key = differing[0]
            return (
                f"{who} has another model than the head: {key} is "
                f"{in_line(about.fingerprint.get(key))}, not {in_line(fingerprint.get(key))}; give "
                f"all hosts the same files"
            )
        if (other := self._hosts.get(about.node_rank)) is not None:
            return f"{other} has joined already; give {about.address} another --node-rank"
        return ""


def _settle(host: Host, rank: int, status: int | None) -> None:
    """A rank has ended, or is lost with its host."""
    if not host.statuses[rank].done():
        host.statuses[rank].set_result(status)
    connection = host.connections[rank]
    if not connection.done():
        connection.set_exception(
            StartupError(f"rank {rank} of {host} has ended; see that host's log")
        )
        connection.exception()  # is raised only where it is awaited
