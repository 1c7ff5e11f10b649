"""The receiving rank's end of its connections: a pair of sockets for each sending rank."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import zmq

from ..errors import PeerRefusedError
from . import frame, greeting
from .carrier import Endpoints, Joined, Lost, Notice, PeerGoneError
from .carrier_names import SHARED_MEMORY, TCP
from .curve import OVERHEAD_BYTES, CurveKeys
from .doorbells import HeardDoorbells, read_doorbell
from .frame import FrameError, Kind
from .greeting import Greeting, PeerKey
from .shared_ring import MappedRing, RingError
from .zmq_sockets import (
    BULK_BUFFER_BYTES,
    CONTROL_BATCH,
    MAX_CONTROL_MESSAGE,
    Socket,
    Timing,
    about_connection,
    has_news,
    open_socket,
    to_peer,
    unwatch,
    watch,
)


@dataclass(frozen=True, slots=True)
class _Shared:
    """The peer's ring as this process sees it, and the pipes that go with it."""

    ring: MappedRing
    bells: HeardDoorbells


@dataclass(slots=True)
class _Dial:
    """One connection to a sending rank."""

    peer: PeerKey
    connection: int
    bulk: Socket
    control: Socket
    watches: tuple[Socket, Socket]  # of both
    heard: float
    next_ping: float
    carrier: str = ""
    shared: _Shared | None = None

    @property
    def live(self) -> bool:
        return bool(self.carrier)

    @property
    def ended(self) -> bool:
        """Whether a connection has ended, and all that had come before is read."""
        unread = has_news(self.bulk) or has_news(self.control)
        return not unread and any(has_news(watch) for watch in self.watches)

    def close(self) -> None:
        for socket, watched in zip((self.bulk, self.control), self.watches, strict=True):
            unwatch(socket, watched)
        if self.shared is not None:
            self.shared.bells.close()


class ZmqDialer:
    """The receiving rank's end: a DEALER pair for each sending rank."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        me: Greeting,
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
        self._dials: dict[PeerKey, _Dial] = {}
        self._turn: deque[PeerKey] = deque()
        self._notices: list[Notice] = []
        self._current: zmq.Frame | None = None
        # Whose ring holds the frame that was given out last.
        self._reading: _Shared | None = None

    def connect(self, peer: PeerKey, endpoints: Endpoints, now: float) -> None:
        if peer in self._dials:
            return
        bulk = self._socket(self._max_frame_bytes)
        control = self._socket(MAX_CONTROL_MESSAGE)
        bulk.setsockopt(zmq.RCVBUF, BULK_BUFFER_BYTES)
        watches = watch(bulk), watch(control)
        dial = _Dial(peer, secrets.randbits(64), bulk, control, watches, now, now)
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
                if self._keys is not None:
                    self._keys.dial(socket, endpoints.key)
                socket.connect(endpoint)
                socket.send(greeting.encode(hello), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lose(dial, f"cannot connect to {endpoint!r}: {error}")

    def _socket(self, limit: int) -> Socket:
        return open_socket(self._context, zmq.DEALER, limit + OVERHEAD_BYTES, self._timing)

    def sockets(self) -> Iterable[Any]:
        sockets: list[Any] = [
            s for d in self._dials.values() for s in (d.bulk, d.control, *d.watches)
        ]
        shared = [d.shared for d in self._dials.values() if d.shared is not None]
        return sockets + [each.bells.fileno() for each in shared]

    def live(self) -> Counter[str]:
        return Counter(dial.carrier for dial in self._dials.values() if dial.live)

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
                if about_connection(message, dial.peer, self._me.epoch, Kind.PONG) is None:
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
            self._choose(dial, theirs)
        except PeerRefusedError as refusal:
            self._lose(dial, str(refusal), refused=True)
        except FrameError as error:
            self._lose(dial, f"bad greeting: {error}")

    def _choose(self, dial: _Dial, theirs: Greeting) -> None:
        """The best carrier that works. Raises ``PeerRefusedError`` when none does."""
        possible = greeting.possible_carriers(self._me, theirs)
        note = ""
        if SHARED_MEMORY in possible and theirs.ring_bytes:
            try:
                dial.shared = _share(dial, theirs)
            except RingError as error:
                note = str(error)
        if dial.shared is None and TCP not in possible:
            raise PeerRefusedError(f"carrier: shared_memory only, and {note or 'no ring is there'}")
        dial.carrier = TCP if dial.shared is None else SHARED_MEMORY
        self._notices.append(Joined(dial.peer, dial.carrier, note))
        if theirs.ring_bytes:
            self._about(dial, Kind.CHOICE, frame.reason_payload(dial.carrier))

    def receive_bulk(self, now: float) -> tuple[PeerKey, memoryview] | None:
        self._current = None
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.bells.give_back()
        for _ in range(len(self._turn)):
            self._turn.rotate(-1)
            dial = self._dials[self._turn[0]]
            try:
                message = self._came(dial) if dial.shared is None else self._rang(dial.shared)
            except RingError as error:
                self._lose(dial, str(error))
                return None
            if message is not None:
                dial.heard = now
                return dial.peer, message
        return None

    def _came(self, dial: _Dial) -> memoryview | None:
        """The next frame that came over TCP, read where ZeroMQ put it: its buffer already holds
        just this frame, and copying it to a slot of ours would cost as much as the scatter."""
        try:
            self._current = dial.bulk.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return memoryview(self._current.buffer)

    def _rang(self, shared: _Shared) -> memoryview | None:
        """The next frame that the peer has told of. Raises ``RingError``."""
        record = shared.bells.next()
        if record is None:
            return None
        place = read_doorbell(record)
        length = len(record) if place is None else place[1]
        if length > self._max_frame_bytes:
            raise RingError(f"a frame of {length} bytes; the limit is {self._max_frame_bytes}")
        if place is None:
            return memoryview(record)
        frame_in_ring = shared.ring.slice(*place)
        self._reading = shared
        return frame_in_ring

    def _about(self, dial: _Dial, kind: Kind, payload: bytes = b"") -> None:
        """A frame about the connection; that it is gone is told by a notice."""
        with contextlib.suppress(PeerGoneError):
            self.send_control(dial.peer, to_peer(kind, self._me.epoch, dial.peer, payload))

    def _lose(self, dial: _Dial, reason: str, *, refused: bool = False) -> None:
        if self._dials.pop(dial.peer, None) is None:
            return
        self._turn.remove(dial.peer)
        self._end(dial)
        self._notices.append(Lost(dial.peer, reason, refused))

    def notices(self, now: float) -> list[Notice]:
        for dial in list(self._dials.values()):
            if dial.ended:
                self._lose(
                    dial,
                    "the connection ended"
                    if dial.live
                    else "nobody listens there, or the locks differ",
                )
            elif now - dial.heard > self._timing.silence_seconds:
                what = "nothing heard" if dial.live else "no answer to the greeting"
                self._lose(dial, f"{what} for {now - dial.heard:.1f} s")
            elif dial.live and now >= dial.next_ping:
                dial.next_ping = now + self._timing.ping_seconds
                self._about(dial, Kind.PING)
        taken, self._notices = self._notices, []
        return taken

    def close(self) -> None:
        self._current = None
        for dial in self._dials.values():
            self._end(dial)
        self._dials.clear()
        self._turn.clear()

    def _end(self, dial: _Dial) -> None:
        if self._reading is dial.shared:
            self._reading = None
        dial.close()


def _share(dial: _Dial, theirs: Greeting) -> _Shared:
    """Map the peer's ring and open its doorbells. Raises ``RingError``."""
    ring = MappedRing(theirs.ring)
    return _Shared(ring, HeardDoorbells(theirs.ring_pid, theirs.bell_descriptor, dial.connection))
