"""The receiving rank's end of its connections: a pair of sockets for each sending rank."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import zmq

from ....errors import PeerRefusedError, TransferError
from ....host_port import split_host_port
from ...wire import frame, greeting
from ...wire.frame import FrameError, Kind, Message
from ...wire.greeting import Greeting, PeerKey
from ..base import FrameReader, ReceiveChannel
from ..ranks import RankCarriers, without_carrier
from ..transport import Endpoints, Joined, Lost, Notice, PeerGoneError
from . import password
from .curve import OVERHEAD_BYTES, CurveKeys
from .sockets import (
    BULK_BUFFER_BYTES,
    CONTROL_BATCH,
    MAX_CONTROL_MESSAGE,
    Socket,
    Timing,
    about_connection,
    is_readable,
    to_peer,
    unwatch,
    was_rejected,
    watched_socket,
)


@dataclass(slots=True)
class _DialedPeer:
    """A connection to a sending rank. ``carrier`` is empty until both have greeted."""

    peer: PeerKey
    connection: int
    bulk: Socket
    control: Socket
    watches: tuple[Socket, Socket]  # of bulk and control
    last_heard: float
    next_ping: float
    carrier: str = ""
    reader: FrameReader | None = None

    @property
    def live(self) -> bool:
        return self.reader is not None

    @property
    def ended(self) -> bool:
        """True if a connection has ended, and all messages are read."""
        unread = is_readable(self.bulk) or is_readable(self.control)
        return not unread and any(is_readable(watch) for watch in self.watches)

    def close(self) -> None:
        for socket, watched in zip((self.bulk, self.control), self.watches, strict=True):
            unwatch(socket, watched)
        if self.reader is not None:
            self.reader.close()


class ZmqDialer:
    """The receiving rank's end: a DEALER pair for each sending rank."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        me: Greeting,
        carriers: RankCarriers,
        *,
        max_frame_bytes: int,
        timing: Timing,
        keys: CurveKeys | None = None,
    ) -> None:
        self._context = context
        self._me = me
        self._max_frame_bytes = max_frame_bytes
        self._timing = timing
        self._keys = keys
        self._carriers = carriers
        self._dials: dict[PeerKey, _DialedPeer] = {}
        self._turn: deque[PeerKey] = deque()
        self._notices: list[Notice] = []
        # The reader of the last returned frame.
        self._reading: FrameReader | None = None

    def connect(self, peer: PeerKey, endpoints: Endpoints, now: float) -> None:
        if peer in self._dials:
            return
        try:
            dial = self._new_dial(peer, now)
        except zmq.ZMQError as error:
            reason = f"no socket for it: {error.strerror}; raise this process's limit of open files"
            self._notices.append(Lost(peer, reason))
            return
        hello = replace(self._me, connection=dial.connection, peer_epoch=peer.epoch)
        self._dials[peer] = dial
        self._turn.append(peer)
        try:
            for socket, endpoint in (
                (dial.bulk, endpoints.bulk),
                (dial.control, endpoints.control),
            ):
                # The head accepts only the local sockets that the operator configured.
                if not endpoint.startswith(("tcp://", "ipc://")):
                    self._lose(dial, f"endpoint {endpoint!r} is not tcp://", refused=True)
                    return
                if ":" in split_host_port(endpoint.removeprefix("tcp://"))[0]:
                    socket.setsockopt(zmq.IPV6, 1)
                socket.setsockopt(zmq.RECONNECT_IVL, -1)
                if self._keys is not None:
                    self._keys.dial(socket, endpoints.key)
                else:
                    password.show(socket, peer.epoch)
                socket.connect(endpoint)
                with contextlib.suppress(zmq.Again):  # ended already; its watch reports it
                    socket.send(greeting.encode(hello), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lose(dial, f"cannot connect to {endpoint!r}: {error}")

    def _new_dial(self, peer: PeerKey, now: float) -> _DialedPeer:
        """A dial with unconnected sockets. Raises ``ZMQError`` if there are no more sockets."""
        bulk, bulk_watch = self._socket(self._max_frame_bytes)
        try:
            control, control_watch = self._socket(MAX_CONTROL_MESSAGE)
        except zmq.ZMQError:
            unwatch(bulk, bulk_watch)
            raise
        bulk.setsockopt(zmq.RCVBUF, BULK_BUFFER_BYTES)
        watches = bulk_watch, control_watch
        return _DialedPeer(peer, secrets.randbits(64), bulk, control, watches, now, now)

    def _socket(self, limit: int) -> tuple[Socket, Socket]:
        return watched_socket(self._context, limit + OVERHEAD_BYTES, self._timing)

    def sockets(self) -> Iterable[Any]:
        sockets: list[Any] = [s for d in self._dials.values() for s in (d.control, *d.watches)]
        return sockets + self.bulk_sockets()

    def bulk_sockets(self) -> list[Any]:
        return [each for reader in self._readers() for each in reader.descriptors()]

    def _readers(self) -> list[FrameReader]:
        return [dial.reader for dial in self._dials.values() if dial.reader is not None]

    @property
    def needs_polling(self) -> bool:
        return any(reader.needs_polling for reader in self._readers())

    def live(self) -> Counter[str]:
        return Counter(dial.carrier for dial in self._dials.values() if dial.live)

    def is_live(self, peer: PeerKey) -> bool:
        dial = self._dials.get(peer)
        return dial is not None and dial.live

    def carrier(self, peer: PeerKey) -> str:
        dial = self._dials.get(peer)
        return "" if dial is None else dial.carrier

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
        messages = []
        for dial in list(self._dials.values()):
            for _ in range(CONTROL_BATCH):
                try:
                    message = dial.control.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                dial.last_heard = now
                if not dial.live:
                    self._on_reply(dial, message)
                    break
                if about_connection(message, dial.peer, self._me.epoch, Kind.PONG) is None:
                    messages.append((dial.peer, message))
        return messages

    def _on_reply(self, dial: _DialedPeer, message: bytes) -> None:
        """Handle the first message on a control socket: a welcome or a refusal."""
        try:
            theirs = greeting.decode(message)
            if theirs.refused and theirs.full:
                self._lose(dial, theirs.refused, full=True)
                return
            if theirs.refused:
                raise PeerRefusedError(theirs.refused)
            greeting.check_epoch(dial.peer.epoch, theirs.epoch, theirs.node_id)
            if theirs.node_id != dial.peer.node_id:
                raise PeerRefusedError(
                    f"node_id: expected {dial.peer.node_id}, got {theirs.node_id}"
                )
            greeting.check(self._me, theirs)
            self._choose(dial, theirs)
        except PeerRefusedError as refusal:
            self._lose(dial, str(refusal), refused=True)
        except FrameError as error:
            self._lose(dial, f"bad greeting: {error}")
        except TransferError as error:
            self._lose(dial, str(error))

    def _choose(self, dial: _DialedPeer, theirs: Greeting) -> None:
        """Use the best carrier that works. Raises ``TransferError`` if another attempt may succeed,
        otherwise ``PeerRefusedError``."""
        possible = self._carriers.possible(self._me, theirs)
        give_back = partial(self._about, dial, Kind.RELEASE)
        channel = ReceiveChannel(dial.connection, dial.peer, dial.bulk, give_back)
        problems: list[TransferError] = []
        for carrier in possible:
            try:
                dial.reader = carrier.reader(channel, theirs.offers.get(carrier.name, b""))
            except TransferError as error:
                problems.append(error)
                continue
            dial.carrier = carrier.name
            break
        if dial.reader is None:
            text = without_carrier(possible, problems[-1])
            retriable = any(carrier.retriable for carrier in possible)
            raise TransferError(text) if retriable else PeerRefusedError(text)
        self._notices.append(Joined(dial.peer, dial.carrier, "; ".join(map(str, problems))))
        if self._carriers.needs_choice(theirs.offers):
            self._about(dial, Kind.CHOICE, frame.reason_payload(dial.carrier))

    def receive_bulk(self, now: float) -> tuple[PeerKey, Message] | None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.release()
        for _ in range(len(self._turn)):
            self._turn.rotate(-1)
            dial = self._dials[self._turn[0]]
            if dial.reader is None:
                continue
            try:
                message = dial.reader.read(now)
            except TransferError as error:
                self._lose(dial, str(error))
                return None
            if message is not None:
                dial.last_heard = now
                self._reading = dial.reader
                return dial.peer, message
        return None

    def _about(self, dial: _DialedPeer, kind: Kind, payload: bytes = b"") -> None:
        """Send a frame about the connection. If it is gone, a notice reports it."""
        with contextlib.suppress(PeerGoneError):
            self.send_control(dial.peer, to_peer(kind, self._me.epoch, dial.peer, payload))

    def _lose(
        self, dial: _DialedPeer, reason: str, refused: bool = False, *, full: bool = False
    ) -> None:
        if self._dials.pop(dial.peer, None) is None:
            return
        self._turn.remove(dial.peer)
        self._end(dial)
        self._notices.append(Lost(dial.peer, reason, refused, full))

    @property
    def has_notices(self) -> bool:
        return bool(self._notices)

    def notices(self, now: float) -> list[Notice]:
        for dial in list(self._dials.values()):
            if dial.ended:
                self._lose(dial, *self._end_reason(dial))
            elif now - dial.last_heard > self._timing.silence_seconds:
                what = "nothing heard" if dial.live else "no reply to the greeting"
                self._lose(dial, f"{what} for {now - dial.last_heard:.1f} s")
            elif dial.live and now >= dial.next_ping:
                dial.next_ping = now + self._timing.ping_seconds
                self._about(dial, Kind.PING)
        notices, self._notices = self._notices, []
        return notices

    def _end_reason(self, dial: _DialedPeer) -> tuple[str, bool]:
        """The reason, and True if no later connection can succeed either."""
        if dial.live:
            return "the connection ended", False
        if not any(was_rejected(watch) for watch in dial.watches):
            return "nothing listens there, or only one side is locked", False
        if self._keys is not None:
            return "the peer does not know this rank's key", False
        was = f"{dial.peer.node_id} was {dial.peer.epoch:016x}"
        return f"epoch: {was}, and another process listens there now", True

    def close(self) -> None:
        for dial in self._dials.values():
            self._end(dial)
        self._dials.clear()
        self._turn.clear()

    def _end(self, dial: _DialedPeer) -> None:
        if self._reading is dial.reader:
            self._reading = None
        dial.close()
