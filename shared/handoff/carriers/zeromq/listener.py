"""The sending rank's end of its connections: two bound sockets, and a table of greeted peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import zmq

from ....causes import Cause
from ....config.limits import MAX_PEERS
from ....errors import PeerRefusedError, StartupError, TransferError
from ....host_port import join_host_port
from ....unix_sockets import UNIX, kv_endpoint
from ...wire import frame, greeting
from ...wire.frame import FrameError, Kind, Message
from ...wire.greeting import Greeting, PeerKey
from ..base import MAX_SLOTS, FrameWriter, SendChannel, SendHandle
from ..ranks import RankCarriers, without_carrier
from ..transport import Endpoints, Joined, Lost, Notice, PeerGoneError
from . import password
from .curve import OVERHEAD_BYTES, CurveKeys, ZapHandler
from .listening_port import ListeningPort
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
from .unknown_connections import UnknownConnections

# The limit of connections with one greeted socket; the other one follows at once.
MAX_HALF_OPEN = 256


@dataclass(slots=True)
class _AcceptedPeer:
    """A greeted connection. ``carrier`` is empty until the peer has chosen one of ``writers``.
    ``note``: why there are no more of them."""

    peer: PeerKey
    control_id: bytes
    last_heard: float
    writers: dict[str, FrameWriter]
    note: str
    max_payload: int
    kv_scales: tuple[float, ...]
    carrier: str = ""

    @property
    def writer(self) -> FrameWriter | None:
        return self.writers.get(self.carrier)


@dataclass(slots=True)
class _HalfOpen:
    """A connection with one greeted socket."""

    first: Greeting
    control_id: bytes
    bulk_id: bytes
    since: float


class ZmqListener:
    """The sending rank's end: two bound ROUTERs and a table of greeted peers."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        me: Greeting,
        carriers: RankCarriers,
        *,
        host: str,
        port: int,
        timing: Timing,
        keys: CurveKeys | None = None,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self._context = context
        self._me = replace(me, offers={})
        self._carriers = carriers
        self._host = host
        self._port = port
        self._timing = timing
        self._keys = keys
        self._zap: ZapHandler | None = None
        self._unknown = UnknownConnections(timing.silence_seconds)
        self.unknown_connections = self.keys_refused = 0
        self._max_peers = max_peers
        self._bulk: Socket | None = None
        self._control: Socket | None = None
        self._ports: list[ListeningPort] = []
        self._half_open: dict[int, _HalfOpen] = {}
        self._by_peer: dict[PeerKey, _AcceptedPeer] = {}
        self._by_control: dict[bytes, _AcceptedPeer] = {}
        self._notices: list[Notice] = []

    def start(self) -> Endpoints:
        self._zap = ZapHandler(self._context, locked=self._keys is not None, epoch=self._me.epoch)
        self._bulk = self._new_socket()
        # Frames in flight are bounded in bytes by the staging ring and by credits; a high-water
        # mark, which counts messages, would only interfere.
        self._bulk.setsockopt(zmq.SNDHWM, 0)
        self._control = self._new_socket()
        bulk, control = self._ports
        second = self._port and self._port + 1
        return Endpoints(
            bulk=self._listen(bulk, "bulk", self._port, BULK_BUFFER_BYTES),
            control=self._listen(control, "control", second),
            key="" if self._keys is None else self._keys.public,
        )

    def admit(self, keys: Iterable[str]) -> None:
        """Admit only dialers with these CURVE keys."""
        if self._zap is not None:
            self._zap.admit(keys)

    def _new_socket(self) -> Socket:
        # Only greetings and control frames arrive, also on the bulk socket. The limit applies to
        # each part of a message, and the number of parts is unlimited, so a dialer must pass the
        # handshake before it can send.
        limit = MAX_CONTROL_MESSAGE + OVERHEAD_BYTES
        socket = open_socket(self._context, zmq.ROUTER, limit, self._timing)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._keys is not None:
            self._keys.serve(socket)
        else:
            password.guard(socket)
        self._ports.append(ListeningPort(socket))
        return socket

    def _listen(self, at: ListeningPort, name: str, port: int, send_buffer: int = 0) -> str:
        folder = self._host.removeprefix(UNIX) if self._host.startswith(UNIX) else ""
        where = (
            kv_endpoint(folder, self._me.rank, name)
            if folder
            else join_host_port(self._host, port or "*")
        )
        try:
            if folder:
                return at.listen_in_folder(where)
            return at.listen(self._host, port, send_buffer)
        except (OSError, zmq.ZMQError) as error:
            raise StartupError(
                f"cannot listen on {where} for KV: {error.strerror}; --kv-host must be an "
                f"address of this machine, and the ports from --kv-port on free"
            ) from None

    def sockets(self) -> Iterable[Any]:
        zap = None if self._zap is None else self._zap.socket
        ours = [s for s in (self._bulk, self._control, zap) if s is not None]
        return [*ours, *(port.monitor for port in self._ports), *self.loan_sockets()]

    def _writers(self) -> list[FrameWriter]:
        return [
            accepted.writer for accepted in self._by_peer.values() if accepted.writer is not None
        ]

    @property
    def needs_polling(self) -> bool:
        return any(writer.needs_polling for writer in self._writers())

    def is_live(self, peer: PeerKey) -> bool:
        accepted = self._by_peer.get(peer)
        return accepted is not None and bool(accepted.carrier)

    def live(self) -> Counter[str]:
        return Counter(each.carrier for each in self._by_peer.values() if each.carrier)

    def send_bulk(self, peer: PeerKey, message: Message, offset: int | None = None) -> SendHandle:
        accepted = self._accepted(peer)
        if accepted.writer is None:
            raise PeerGoneError(f"{peer} has not chosen a carrier")
        try:
            return accepted.writer.write(message, offset)
        except (zmq.ZMQError, OSError) as error:
            self._lose(accepted, f"bulk connection is gone: {error}")
            raise PeerGoneError(f"{peer} is gone: {error}") from None

    def carrier(self, peer: PeerKey) -> str:
        accepted = self._by_peer.get(peer)
        return "" if accepted is None else accepted.carrier

    def slots_for(self, peer: PeerKey) -> int:
        accepted = self._by_peer.get(peer)
        return MAX_SLOTS if accepted is None or accepted.writer is None else accepted.writer.slots

    def max_payload(self, peer: PeerKey) -> int:
        return self._accepted(peer).max_payload

    def kv_scales(self, peer: PeerKey) -> tuple[float, ...]:
        return self._accepted(peer).kv_scales

    def send_control(self, peer: PeerKey, message: bytes) -> None:
        accepted = self._accepted(peer)
        if not self._reply(accepted.control_id, message):
            self._lose(accepted, "control connection is gone")
            raise PeerGoneError(f"{peer} is gone")

    def _accepted(self, peer: PeerKey) -> _AcceptedPeer:
        accepted = self._by_peer.get(peer)
        if accepted is None:
            raise PeerGoneError(f"{peer} has not greeted")
        return accepted

    def _reply(self, control_id: bytes, message: bytes) -> bool:
        assert self._control is not None
        try:
            self._control.send_multipart([control_id, message], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    @property
    def is_greeting(self) -> bool:
        settled = all(accepted.carrier for accepted in self._by_peer.values())
        return bool(self._half_open) or not settled

    def loan_sockets(self) -> list[Any]:
        return [each for writer in self._writers() for each in writer.descriptors()]

    def reply_sockets(self) -> list[Any]:
        ours = [] if self._control is None else [self._control]
        return ours + self.loan_sockets()

    def receive_control(self, now: float) -> list[tuple[PeerKey, bytes]]:
        if self._bulk is None:
            return []
        if self._zap is not None:
            self._zap.reply()
        for sender, message in drain(self._bulk):
            self._on_greeting(message, now, bulk_id=sender)
        return self.receive_replies(now)

    def receive_replies(self, now: float) -> list[tuple[PeerKey, bytes]]:
        assert self._control is not None
        messages = []
        for sender, message in drain(self._control):
            accepted = self._by_control.get(sender)
            if accepted is None:
                self._on_greeting(message, now, control_id=sender)
                continue
            accepted.last_heard = now
            if not self._handle_own(accepted, message):
                messages.append((accepted.peer, message))
        for accepted in list(self._by_peer.values()):
            if accepted.writer is not None:
                self._take_back(accepted, accepted.writer.poll)
        return messages

    def _take_back(self, accepted: _AcceptedPeer, give_back: Callable[[], None]) -> None:
        try:
            give_back()
        except (EOFError, OSError, TransferError) as error:
            self._lose(accepted, str(error))

    def _handle_own(self, accepted: _AcceptedPeer, message: bytes) -> bool:
        """Handle a message about the connection itself; True if it was one."""
        own = about_connection(
            message, accepted.peer, self._me.epoch, Kind.PING, Kind.CHOICE, Kind.RELEASE
        )
        if own is None:
            return False
        kind, payload = own
        if kind is Kind.PING:
            self._reply(accepted.control_id, to_peer(Kind.PONG, self._me.epoch, accepted.peer))
        elif kind is Kind.RELEASE:
            if accepted.writer is not None:
                self._take_back(accepted, partial(accepted.writer.loans.give_back, 1))
        else:
            self._on_choice(accepted, frame.read_reason(payload))
        return True

    def _on_choice(self, accepted: _AcceptedPeer, carrier: str) -> None:
        if accepted.carrier or carrier not in accepted.writers:
            names = ", ".join(accepted.writers)
            self._lose(accepted, f"it chose the carrier {carrier!r}; offered: {names}")
            return
        accepted.carrier = carrier
        for name in accepted.writers.keys() - {carrier}:
            accepted.writers.pop(name).close()
        accepted.writers[carrier].start()
        self._notices.append(Joined(accepted.peer, carrier, accepted.note))

    def _on_greeting(
        self, message: bytes, now: float, *, control_id: bytes = b"", bulk_id: bytes = b""
    ) -> None:
        """Match the greetings of a connection's two sockets by its number."""
        try:
            theirs = greeting.decode(message)
        except FrameError:
            return  # foreign, or from an abandoned connection: no reply
        if theirs.connection not in self._half_open and len(self._half_open) >= MAX_HALF_OPEN:
            del self._half_open[next(iter(self._half_open))]
        half = self._half_open.setdefault(theirs.connection, _HalfOpen(theirs, b"", b"", now))
        half.control_id = half.control_id or control_id
        half.bulk_id = half.bulk_id or bulk_id
        if half.first != theirs:
            del self._half_open[theirs.connection]
        elif half.control_id and half.bulk_id:
            del self._half_open[theirs.connection]
            self._welcome(theirs, half, now)

    def _welcome(self, theirs: Greeting, half: _HalfOpen, now: float) -> None:
        welcome = replace(self._me, connection=theirs.connection, peer_epoch=theirs.epoch)
        try:
            greeting.check_epoch(theirs.peer_epoch, self._me.epoch, self._me.node_id)
            greeting.check(self._me, theirs)
            if len(self._by_peer) >= self._max_peers and theirs.key not in self._by_peer:
                raise TransferError(
                    f"{self._max_peers} ranks are connected, which is the limit; see --max-peers",
                    cause=Cause.NO_PLACE,
                )
            writers, note = self._offer(theirs, half)
        except TransferError as refusal:
            text, full = greeting.refusal_text(refusal), int(refusal.cause is Cause.NO_PLACE)
            refused = replace(welcome, refused=text, full=full)
            self._reply(half.control_id, greeting.encode(refused))
            return
        old = self._by_peer.get(theirs.key)
        if old is not None:
            self._lose(old, "the peer connected anew")
        accepted = _AcceptedPeer(
            theirs.key, half.control_id, now, writers, note, theirs.max_payload, theirs.scales
        )
        self._by_peer[accepted.peer] = self._by_control[accepted.control_id] = accepted
        self._unknown.greeted(2)
        welcome = replace(welcome, offers={name: w.offer for name, w in writers.items()})
        if not self._carriers.needs_choice(writers):
            self._on_choice(accepted, next(iter(writers)))
        self._reply(accepted.control_id, greeting.encode(welcome))

    def _offer(self, theirs: Greeting, half: _HalfOpen) -> tuple[dict[str, FrameWriter], str]:
        """Writers of the carriers that both ranks may use, and why others do not work. Raises
        ``TransferError`` if none works."""
        assert self._bulk is not None
        channel = SendChannel(theirs.connection, self._bulk, half.bulk_id)
        writers: dict[str, FrameWriter] = {}
        problems: list[OSError | TransferError] = []
        possible = self._carriers.possible(self._me, theirs)
        for carrier in possible:
            try:
                hello = theirs.offers.get(carrier.name, b"")
                writers[carrier.name] = carrier.writer(channel, hello)
            except (OSError, TransferError) as error:  # OSError: out of descriptors
                problems.append(error)
        if not writers:
            text = without_carrier(possible, problems[-1])
            if isinstance(problems[-1], OSError):
                raise TransferError(text, cause=Cause.NO_PLACE)
            raise PeerRefusedError(text)
        return writers, "; ".join(map(str, problems))

    def _lose(self, accepted: _AcceptedPeer, reason: str) -> None:
        if self._by_peer.get(accepted.peer) is accepted:
            del self._by_peer[accepted.peer]
            del self._by_control[accepted.control_id]
            self._notices.append(Lost(accepted.peer, reason))
            _end(accepted)

    @property
    def has_notices(self) -> bool:
        return bool(self._notices)

    def notices(self, now: float) -> list[Notice]:
        silence = self._timing.silence_seconds
        for accepted in list(self._by_peer.values()):
            if now - accepted.last_heard > silence:
                self._lose(accepted, f"nothing heard for {now - accepted.last_heard:.1f} s")
        for connection, half in list(self._half_open.items()):
            if now - half.since > silence:
                del self._half_open[connection]
        for port in self._ports:
            port.update(len(self._by_peer) + len(self._half_open), now)
        total = sum(port.accepted for port in self._ports)
        self.unknown_connections = self._unknown.count(total, now)
        self.keys_refused = 0 if self._zap is None else self._zap.refused
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        for port in self._ports:
            port.close()
        self._ports.clear()
        if self._zap is not None:
            self._zap.close()
        self._bulk = self._control = None
        for accepted in self._by_peer.values():
            _end(accepted)
        self._by_peer.clear()
        self._by_control.clear()
        self._half_open.clear()


def _end(accepted: _AcceptedPeer) -> None:
    for writer in accepted.writers.values():
        writer.close()
    accepted.writers.clear()
