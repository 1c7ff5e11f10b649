"""The carrier over ZeroMQ and TCP: bytes travel.

The sending rank binds two ROUTERs (bulk, control), the receiving rank connects a DEALER pair for
each sender, so only prefill nodes need ports that others can reach. A connection has one life: it
is never silently re-established (``RECONNECT_IVL=-1``), because ZeroMQ would replay queued frames
to whatever process answers there. Liveness is ours: the dialer pings on the control socket, and
silence of ``silence_seconds`` in either direction loses the peer.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import zmq

from ..errors import PeerRefusedError, StartupError
from . import frame, greeting
from .carrier import Departure, Endpoints, Joined, Lost, Notice, PeerGoneError
from .frame import FrameError, Header, Kind
from .greeting import Greeting, PeerKey

Socket: TypeAlias = "zmq.Socket[bytes]"

MAX_CONTROL_MESSAGE = greeting.MAX_GREETING_BYTES
CONTROL_BATCH = 256
MAX_PEERS = 1024
BULK_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A dead peer is found after ``silence_seconds`` plus one tick of the loop."""

    ping_seconds: float = 0.5
    silence_seconds: float = 2.0

    @property
    def zmq_heartbeat_ms(self) -> int:
        return int(self.silence_seconds * 500)


def _open(context: zmq.Context[Socket], kind: int, limit: int, timing: Timing) -> Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, limit)
    socket.setsockopt(zmq.HEARTBEAT_IVL, timing.zmq_heartbeat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * timing.zmq_heartbeat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 2 * timing.zmq_heartbeat_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2 * timing.zmq_heartbeat_ms)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 2)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    return socket


def _ping(kind: Kind, mine: int, theirs: int) -> bytes:
    return frame.encode(Header(kind=kind, sender_epoch=mine, receiver_epoch=theirs))


@dataclass(slots=True)
class _Link:
    """A greeted connection, as the listener sees it."""

    peer: PeerKey
    control_id: bytes
    bulk_id: bytes
    heard: float


@dataclass(slots=True)
class _Half:
    """A connection of which one socket has greeted so far."""

    first: Greeting
    control_id: bytes
    bulk_id: bytes
    since: float


class ZmqListener:
    """The sending rank's end: two bound ROUTERs and a table of who greeted."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        me: Greeting,
        *,
        host: str,
        port: int,
        max_frame_bytes: int,
        timing: Timing,
    ) -> None:
        self._context = context
        self._me = me
        self._host = host
        self._port = port
        self._max_frame_bytes = max_frame_bytes
        self._timing = timing
        self._bulk: Socket | None = None
        self._control: Socket | None = None
        self._halves: dict[int, _Half] = {}
        self._by_peer: dict[PeerKey, _Link] = {}
        self._by_control: dict[bytes, _Link] = {}
        self._notices: list[Notice] = []

    def start(self) -> Endpoints:
        self._bulk = self._bind(self._max_frame_bytes)
        self._bulk.setsockopt(zmq.SNDBUF, BULK_BUFFER_BYTES)
        # Frames in flight are bounded by the staging ring and by credits, which count bytes; a
        # mark that counts messages could only get in their way.
        self._bulk.setsockopt(zmq.SNDHWM, 0)
        self._control = self._bind(MAX_CONTROL_MESSAGE)
        second = self._port and self._port + 1
        return Endpoints(
            bulk=self._listen(self._bulk, self._port), control=self._listen(self._control, second)
        )

    def _bind(self, limit: int) -> Socket:
        socket = _open(self._context, zmq.ROUTER, limit, self._timing)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        return socket

    def _listen(self, socket: Socket, port: int) -> str:
        if ":" in self._host:
            socket.setsockopt(zmq.IPV6, 1)
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise StartupError(
                f"cannot listen on {host}:{port} for KV: {error.strerror}; --kv-host must be an "
                f"address of this machine, and the ports from --kv-port on free"
            ) from None
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def sockets(self) -> Iterable[Any]:
        return [s for s in (self._bulk, self._control) if s is not None]

    def is_live(self, peer: PeerKey) -> bool:
        return peer in self._by_peer

    def send_bulk(self, peer: PeerKey, message: memoryview) -> Departure:
        link = self._link(peer)
        assert self._bulk is not None
        try:
            self._bulk.send(link.bulk_id, zmq.SNDMORE | zmq.NOBLOCK)
            tracker = self._bulk.send(message, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            self._lose(link, f"bulk connection is gone: {error}")
            raise PeerGoneError(f"{peer} is gone: {error}") from None
        assert tracker is not None
        return tracker

    def send_control(self, peer: PeerKey, message: bytes) -> None:
        link = self._link(peer)
        if not self._reply(link.control_id, message):
            self._lose(link, "control connection is gone")
            raise PeerGoneError(f"{peer} is gone")

    def _link(self, peer: PeerKey) -> _Link:
        link = self._by_peer.get(peer)
        if link is None:
            raise PeerGoneError(f"{peer} has not greeted")
        return link

    def _reply(self, control_id: bytes, message: bytes) -> bool:
        assert self._control is not None
        try:
            self._control.send_multipart([control_id, message], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive_control(self, now: float) -> list[tuple[PeerKey, bytes]]:
        if self._bulk is None or self._control is None:
            return []
        for sender, message in _drain(self._bulk):
            self._greeted(message, now, bulk_id=sender)
        taken = []
        for sender, message in _drain(self._control):
            link = self._by_control.get(sender)
            if link is None:
                self._greeted(message, now, control_id=sender)
                continue
            link.heard = now
            if _is_kind(message, Kind.PING):
                self._reply(sender, _ping(Kind.PONG, self._me.epoch, link.peer.epoch))
            else:
                taken.append((link.peer, message))
        return taken

    def _greeted(
        self, message: bytes, now: float, *, control_id: bytes = b"", bulk_id: bytes = b""
    ) -> None:
        """One socket of a connection said who it is; both together make a link."""
        try:
            theirs = greeting.decode(message)
        except FrameError:
            return  # not one of ours, or a connection that was given up: it is owed no answer
        half = self._halves.setdefault(theirs.connection, _Half(theirs, b"", b"", now))
        half.control_id = half.control_id or control_id
        half.bulk_id = half.bulk_id or bulk_id
        if half.first != theirs or len(self._halves) + len(self._by_peer) > MAX_PEERS:
            del self._halves[theirs.connection]
        elif half.control_id and half.bulk_id:
            del self._halves[theirs.connection]
            self._welcome(theirs, half, now)

    def _welcome(self, theirs: Greeting, half: _Half, now: float) -> None:
        answer = replace(self._me, connection=theirs.connection, peer_epoch=theirs.epoch)
        try:
            greeting.check_epoch(theirs.peer_epoch, self._me.epoch, self._me.node_id)
            greeting.check(self._me, theirs)
        except PeerRefusedError as refusal:
            text = str(refusal)[: greeting.MAX_TEXT_BYTES]
            self._reply(half.control_id, greeting.encode(replace(answer, refused=text)))
            return
        old = self._by_peer.get(theirs.key)
        if old is not None:
            self._lose(old, "the peer connected anew")
        link = _Link(theirs.key, half.control_id, half.bulk_id, now)
        self._by_peer[link.peer] = self._by_control[link.control_id] = link
        self._notices.append(Joined(link.peer))
        self._reply(link.control_id, greeting.encode(answer))

    def _lose(self, link: _Link, reason: str) -> None:
        if self._by_peer.get(link.peer) is link:
            del self._by_peer[link.peer]
            del self._by_control[link.control_id]
            self._notices.append(Lost(link.peer, reason))

    def notices(self, now: float) -> list[Notice]:
        silence = self._timing.silence_seconds
        for link in list(self._by_peer.values()):
            if now - link.heard > silence:
                self._lose(link, f"nothing heard for {now - link.heard:.1f} s")
        for connection, half in list(self._halves.items()):
            if now - half.since > silence:
                del self._halves[connection]
        taken, self._notices = self._notices, []
        return taken

    def close(self) -> None:
        for socket in self.sockets():
            socket.close(0)
        self._bulk = self._control = None
        self._by_peer.clear()
        self._by_control.clear()
        self._halves.clear()


@dataclass(slots=True)
class _Dial:
    """One connection to a sending rank."""

    peer: PeerKey
    connection: int
    bulk: Socket
    control: Socket
    heard: float
    next_ping: float
    live: bool = False


class ZmqDialer:
    """The receiving rank's end: a DEALER pair for each sending rank."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        me: Greeting,
        *,
        max_frame_bytes: int,
        timing: Timing,
    ) -> None:
        self._context = context
        self._me = me
        self._max_frame_bytes = max_frame_bytes
        self._timing = timing
        self._dials: dict[PeerKey, _Dial] = {}
        self._turn: deque[PeerKey] = deque()
        self._notices: list[Notice] = []
        self._current: zmq.Frame | None = None

    def connect(self, peer: PeerKey, endpoints: Endpoints, now: float) -> None:
        if peer in self._dials:
            return
        bulk = _open(self._context, zmq.DEALER, self._max_frame_bytes, self._timing)
        control = _open(self._context, zmq.DEALER, MAX_CONTROL_MESSAGE, self._timing)
        bulk.setsockopt(zmq.RCVBUF, BULK_BUFFER_BYTES)
        dial = _Dial(peer, secrets.randbits(64), bulk, control, now, now)
        hello = replace(self._me, connection=dial.connection, peer_epoch=peer.epoch)
        self._dials[peer] = dial
        self._turn.append(peer)
        try:
            for socket, endpoint in ((bulk, endpoints.bulk), (control, endpoints.control)):
                # Peers say where they listen; they must not point us at local sockets (ipc://).
                if not endpoint.startswith("tcp://"):
                    self._lose(dial, f"endpoint {endpoint!r} is not tcp://", refused=True)
                    return
                if ":" in endpoint.removeprefix("tcp://").rpartition(":")[0]:
                    socket.setsockopt(zmq.IPV6, 1)
                socket.setsockopt(zmq.RECONNECT_IVL, -1)
                socket.connect(endpoint)
                socket.send(greeting.encode(hello), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lose(dial, f"cannot connect to {endpoint!r}: {error}")

    def sockets(self) -> Iterable[Any]:
        return [s for dial in self._dials.values() for s in (dial.bulk, dial.control)]

    def is_live(self, peer: PeerKey) -> bool:
        dial = self._dials.get(peer)
        return dial is not None and dial.live

    def send_control(self, peer: PeerKey, message: bytes) -> None:
        dial = self._dials.get(peer)
        if dial is None or not dial.live:
            raise PeerGoneError(f"no live connection to {peer}")
        try:
            dial.control.send(message, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lose(dial, f"control connection is gone: {error}")
            raise PeerGoneError(f"{peer} is gone: {error}") from None

    def receive_control(self, now: float) -> list[tuple[PeerKey, bytes]]:
        taken = []
        for dial in list(self._dials.values()):
            for _ in range(CONTROL_BATCH):
                try:
                    message = dial.control.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                dial.heard = now
                if not dial.live:
                    self._answered(dial, message)
                    break
                if not _is_kind(message, Kind.PONG):
                    taken.append((dial.peer, message))
        return taken

    def _answered(self, dial: _Dial, message: bytes) -> None:
        """The first message on a control socket is a welcome or a refusal."""
        try:
            theirs = greeting.decode(message)
            if theirs.refused:
                raise PeerRefusedError(theirs.refused)
            greeting.check_epoch(dial.peer.epoch, theirs.epoch, theirs.node_id)
            if theirs.node_id != dial.peer.node_id:
                raise PeerRefusedError(f"node_id: wanted {dial.peer.node_id}, at {theirs.node_id}")
            greeting.check(self._me, theirs)
        except PeerRefusedError as refusal:
            self._lose(dial, str(refusal), refused=True)
        except FrameError as error:
            self._lose(dial, f"bad greeting: {error}")
        else:
            dial.live = True
            self._notices.append(Joined(dial.peer))

    def receive_bulk(self, now: float) -> tuple[PeerKey, memoryview] | None:
        # Read where ZeroMQ put it: its buffer already holds just this frame, and copying it to a
        # slot of ours would cost as much again as the scatter.
        for _ in range(len(self._turn)):
            self._turn.rotate(-1)
            dial = self._dials[self._turn[0]]
            try:
                self._current = dial.bulk.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                continue
            dial.heard = now
            return dial.peer, memoryview(self._current.buffer)
        self._current = None
        return None

    def _lose(self, dial: _Dial, reason: str, *, refused: bool = False) -> None:
        if self._dials.pop(dial.peer, None) is None:
            return
        self._turn.remove(dial.peer)
        dial.bulk.close(0)
        dial.control.close(0)
        self._notices.append(Lost(dial.peer, reason, refused))

    def notices(self, now: float) -> list[Notice]:
        for dial in list(self._dials.values()):
            if now - dial.heard > self._timing.silence_seconds:
                what = "nothing heard" if dial.live else "no answer to the greeting"
                self._lose(dial, f"{what} for {now - dial.heard:.1f} s")
            elif dial.live and now >= dial.next_ping:
                dial.next_ping = now + self._timing.ping_seconds
                try:
                    self.send_control(dial.peer, _ping(Kind.PING, self._me.epoch, dial.peer.epoch))
                except PeerGoneError:
                    continue  # losing it has queued a notice
        taken, self._notices = self._notices, []
        return taken

    def close(self) -> None:
        self._current = None
        for dial in self._dials.values():
            dial.bulk.close(0)
            dial.control.close(0)
        self._dials.clear()
        self._turn.clear()


def _is_kind(message: bytes, kind: Kind) -> bool:
    try:
        return frame.decode(message, frame.MAX_REASON_BYTES)[0].kind is kind
    except FrameError:
        return False


def _drain(router: Socket) -> list[tuple[bytes, bytes]]:
    """Waiting messages of a ROUTER, a bounded number; those of another shape are dropped."""
    taken = []
    for _ in range(CONTROL_BATCH):
        try:
            parts = router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        if len(parts) == 2:
            taken.append((parts[0], parts[1]))
    return taken
