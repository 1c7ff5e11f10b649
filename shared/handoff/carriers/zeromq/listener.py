"""The sending rank's end of its connections: two bound sockets and a table of who greeted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import zmq

from ....causes import Cause
from ....config.limits import MAX_PEERS
from ....errors import StartupError, TransferError
from ....unix_sockets import UNIX, kv_endpoint
from ...stats import DataPlaneStats
from ...wire import frame, greeting
from ...wire.frame import FrameError, Kind, Message
from ...wire.greeting import Greeting, PeerKey
from ..base import MAX_SLOTS, Departure, Endpoints, Joined, Lost, Notice, PeerGoneError
from ..names import CUDA_IPC, NIXL, SHARED_MEMORY, TCP
from ..nixl.agent import NixlAgent
from ..outlets import DeviceOutlet, NixlOutlet, Outlet, RingOutlet, TcpOutlet
from . import password
from .curve import OVERHEAD_BYTES, CurveKeys, Door
from .entrance import Entrance
from .sockets import (
    BULK_BUFFER_BYTES,
    MAX_CONTROL_MESSAGE,
    Socket,
    Timing,
    about_connection,
    drain,
    open_socket,
    to_peer,
)
from .strangers import Strangers

# Connections of which one socket has greeted; the other follows at once.
MAX_HALVES = 256


@dataclass(slots=True)
class _Link:
    """A greeted connection. ``carrier`` is empty until the peer has chosen among ``offered``."""

    peer: PeerKey
    control_id: bytes
    heard: float
    offered: dict[str, Outlet]
    carrier: str = ""

    @property
    def outlet(self) -> Outlet | None:
        return self.offered.get(self.carrier)


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
        timing: Timing,
        stats: DataPlaneStats,
        keys: CurveKeys | None = None,
        agent: NixlAgent | None = None,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self._context = context
        self._me = me
        self._host = host
        self._port = port
        self._timing = timing
        self._stats = stats
        self._keys = keys
        self._door: Door | None = None
        self._strangers = Strangers(timing.silence_seconds)
        self._agent = agent
        self._max_peers = max_peers
        self._bulk: Socket | None = None
        self._control: Socket | None = None
        self._entrances: list[Entrance] = []
        self._halves: dict[int, _Half] = {}
        self._by_peer: dict[PeerKey, _Link] = {}
        self._by_control: dict[bytes, _Link] = {}
        self._notices: list[Notice] = []

    def start(self) -> Endpoints:
        self._door = Door(self._context, locked=self._keys is not None, epoch=self._me.epoch)
        self._bulk = self._new_socket()
        # Frames in flight are bounded by the staging ring and by credits, which count bytes; a
        # mark that counts messages could only get in their way.
        self._bulk.setsockopt(zmq.SNDHWM, 0)
        self._control = self._new_socket()
        bulk, control = self._entrances
        second = self._port and self._port + 1
        return Endpoints(
            bulk=self._listen(bulk, "bulk", self._port, BULK_BUFFER_BYTES),
            control=self._listen(control, "control", second),
            key="" if self._keys is None else self._keys.public,
        )

    def admit(self, keys: Iterable[str]) -> None:
        """From now on let in dialers with these CURVE keys, and no others."""
        if self._door is not None:
            self._door.admit(keys)

    def _new_socket(self) -> Socket:
        # Only greetings and control frames come in, also on the bulk socket. The limit is one for a
        # part of a message, and a message may have any number of them: so nobody may send one who
        # has not passed the handshake.
        limit = MAX_CONTROL_MESSAGE + OVERHEAD_BYTES
        socket = open_socket(self._context, zmq.ROUTER, limit, self._timing)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._keys is not None:
            self._keys.serve(socket)
        else:
            password.guard(socket)
        self._entrances.append(Entrance(socket))
        return socket

    def _listen(self, entrance: Entrance, name: str, port: int, send_buffer: int = 0) -> str:
        folder = self._host.removeprefix(UNIX) if self._host.startswith(UNIX) else ""
        where = (
            kv_endpoint(folder, self._me.rank, name) if folder else f"{self._host}:{port or '*'}"
        )
        try:
            if folder:
                return entrance.listen_in_folder(where)
            return entrance.listen(self._host, port, send_buffer)
        except (OSError, zmq.ZMQError) as error:
            raise StartupError(
                f"cannot listen on {where} for KV: {error.strerror}; --kv-host must be an "
                f"address of this machine, and the ports from --kv-port on free"
            ) from None

    def sockets(self) -> Iterable[Any]:
        door = None if self._door is None else self._door.socket
        ours = [s for s in (self._bulk, self._control, door) if s is not None]
        lent = [each for outlet in self._outlets() for each in outlet.descriptors()]
        return [*ours, *(entrance.monitor for entrance in self._entrances), *lent]

    def _outlets(self) -> list[Outlet]:
        return [link.outlet for link in self._by_peer.values() if link.outlet is not None]

    @property
    def needs_polling(self) -> bool:
        return any(outlet.needs_polling for outlet in self._outlets())

    def is_live(self, peer: PeerKey) -> bool:
        link = self._by_peer.get(peer)
        return link is not None and bool(link.carrier)

    def live(self) -> Counter[str]:
        return Counter(link.carrier for link in self._by_peer.values() if link.carrier)

    def send_bulk(self, peer: PeerKey, message: Message, offset: int | None = None) -> Departure:
        link = self._link(peer)
        if link.outlet is None:
            raise PeerGoneError(f"{peer} has not chosen a carrier")
        try:
            return link.outlet.send(message, offset)
        except (zmq.ZMQError, OSError) as error:
            self._lose(link, f"bulk connection is gone: {error}")
            raise PeerGoneError(f"{peer} is gone: {error}") from None

    def on_device(self, peer: PeerKey) -> bool:
        link = self._by_peer.get(peer)
        return link is not None and link.carrier == CUDA_IPC

    def slots_for(self, peer: PeerKey) -> int:
        link = self._by_peer.get(peer)
        return MAX_SLOTS if link is None or link.outlet is None else link.outlet.slots

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
        if self._door is not None:
            self._door.answer()
        for sender, message in drain(self._bulk):
            self._greeted(message, now, bulk_id=sender)
        taken = []
        for sender, message in drain(self._control):
            link = self._by_control.get(sender)
            if link is None:
                self._greeted(message, now, control_id=sender)
                continue
            link.heard = now
            if not self._took(link, message):
                taken.append((link.peer, message))
        for link in list(self._by_peer.values()):
            if link.outlet is not None:
                self._take_back(link, link.outlet.poll)
        return taken

    def _take_back(self, link: _Link, give_back: Callable[[], None]) -> None:
        try:
            give_back()
        except (EOFError, OSError, TransferError) as error:
            self._lose(link, str(error))

    def _took(self, link: _Link, message: bytes) -> bool:
        """Whether the message was about the connection itself, and is dealt with."""
        found = about_connection(
            message, link.peer, self._me.epoch, Kind.PING, Kind.CHOICE, Kind.RELEASE
        )
        if found is None:
            return False
        kind, payload = found
        if kind is Kind.PING:
            self._reply(link.control_id, to_peer(Kind.PONG, self._me.epoch, link.peer))
        elif kind is Kind.RELEASE:
            if link.outlet is not None:
                self._take_back(link, partial(link.outlet.loans.give_back, 1))
        else:
            self._chosen(link, frame.read_reason(payload))
        return True

    def _chosen(self, link: _Link, carrier: str) -> None:
        if link.carrier or carrier not in link.offered:
            offered = ", ".join(link.offered)
            self._lose(link, f"it chose the carrier {carrier!r}, offered were {offered}")
            return
        link.carrier = carrier
        for name in link.offered.keys() - {carrier}:
            link.offered.pop(name).close()
        link.offered[carrier].chosen()
        self._notices.append(Joined(link.peer, carrier))

    def _greeted(
        self, message: bytes, now: float, *, control_id: bytes = b"", bulk_id: bytes = b""
    ) -> None:
        """One socket of a connection said who it is; both together make a link."""
        try:
            theirs = greeting.decode(message)
        except FrameError:
            return  # not one of ours, or a connection that was given up: it is owed no answer
        if theirs.connection not in self._halves and len(self._halves) >= MAX_HALVES:
            del self._halves[next(iter(self._halves))]
        half = self._halves.setdefault(theirs.connection, _Half(theirs, b"", b"", now))
        half.control_id = half.control_id or control_id
        half.bulk_id = half.bulk_id or bulk_id
        if half.first != theirs:
            del self._halves[theirs.connection]
        elif half.control_id and half.bulk_id:
            del self._halves[theirs.connection]
            self._welcome(theirs, half, now)

    def _welcome(self, theirs: Greeting, half: _Half, now: float) -> None:
        answer = replace(self._me, connection=theirs.connection, peer_epoch=theirs.epoch)
        try:
            greeting.check_epoch(theirs.peer_epoch, self._me.epoch, self._me.node_id)
            greeting.check(self._me, theirs)
            possible = greeting.possible_carriers(self._me, theirs)
            if len(self._by_peer) >= self._max_peers and theirs.key not in self._by_peer:
                raise TransferError(
                    f"{self._max_peers} ranks are connected, which is the limit; see --max-peers",
                    cause=Cause.NO_PLACE,
                )
        except TransferError as refusal:
            text, full = greeting.refusal_text(refusal), int(refusal.cause is Cause.NO_PLACE)
            refused = replace(answer, refused=text, full=full)
            self._reply(half.control_id, greeting.encode(refused))
            return
        old = self._by_peer.get(theirs.key)
        if old is not None:
            self._lose(old, "the peer connected anew")
        offered = self._offer(possible, half, theirs.connection)
        link = _Link(theirs.key, half.control_id, now, offered)
        self._by_peer[link.peer] = self._by_control[link.control_id] = link
        self._strangers.greeted(2)
        if SHARED_MEMORY not in offered:
            answer = answer.without_ring()
        if CUDA_IPC not in offered:
            answer = answer.without_device()
        if NIXL not in offered:
            answer = answer.without_nixl()
        for outlet in offered.values():
            answer = outlet.welcome(answer)
        if offered.keys() <= {TCP}:
            self._chosen(link, TCP)
        self._reply(link.control_id, greeting.encode(answer))

    def _offer(self, possible: Iterable[str], half: _Half, connection: int) -> dict[str, Outlet]:
        assert self._bulk is not None
        offered: dict[str, Outlet] = {}
        for name in possible:
            if name == TCP:
                offered[name] = TcpOutlet(self._bulk, half.bulk_id)
            elif name == NIXL:
                assert self._agent is not None
                offered[name] = NixlOutlet(self._bulk, half.bulk_id, self._agent)
            else:
                lends = DeviceOutlet if name == CUDA_IPC else RingOutlet
                with suppress(OSError):  # no descriptor is left: then without
                    offered[name] = lends(connection)
        return offered

    def _lose(self, link: _Link, reason: str) -> None:
        if self._by_peer.get(link.peer) is link:
            del self._by_peer[link.peer]
            del self._by_control[link.control_id]
            self._notices.append(Lost(link.peer, reason))
            _end(link)

    def notices(self, now: float) -> list[Notice]:
        silence = self._timing.silence_seconds
        for link in list(self._by_peer.values()):
            if now - link.heard > silence:
                self._lose(link, f"nothing heard for {now - link.heard:.1f} s")
        for connection, half in list(self._halves.items()):
            if now - half.since > silence:
                del self._halves[connection]
        for entrance in self._entrances:
            entrance.mind(len(self._by_peer) + len(self._halves), now)
        accepted = sum(entrance.accepted for entrance in self._entrances)
        self._stats.strangers = self._strangers.count(accepted, now)
        self._stats.keys_refused = 0 if self._door is None else self._door.refused
        taken, self._notices = self._notices, []
        return taken

    def close(self) -> None:
        for entrance in self._entrances:
            entrance.close()
        self._entrances.clear()
        if self._door is not None:
            self._door.close()
        self._bulk = self._control = None
        for link in self._by_peer.values():
            _end(link)
        self._by_peer.clear()
        self._by_control.clear()
        self._halves.clear()


def _end(link: _Link) -> None:
    for outlet in link.offered.values():
        outlet.close()
    link.offered.clear()
