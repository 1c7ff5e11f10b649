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
from .frame import FrameError, Kind
from .greeting import Greeting, PeerKey
from .shared_ring import MappedRing, RingError, read_doorbell
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

# Frames read in a ring before they are given back together, unless no more are waiting.
RELEASE_BATCH = 4


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
    ring: MappedRing | None = None
    unreleased: int = 0  # frames that were read in the peer's ring

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
        self._reading: _Dial | None = None

    def connect(self, peer: PeerKey, endpoints: Endpoints, now: float) -> None:
        if peer in self._dials:
            return
        bulk = open_socket(self._context, zmq.DEALER, self._max_frame_bytes, self._timing)
        control = open_socket(self._context, zmq.DEALER, MAX_CONTROL_MESSAGE, self._timing)
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
                socket.connect(endpoint)
                socket.send(greeting.encode(hello), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lose(dial, f"cannot connect to {endpoint!r}: {error}")

    def sockets(self) -> Iterable[Any]:
        return [s for d in self._dials.values() for s in (d.bulk, d.control, *d.watches)]

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
                dial.ring = MappedRing(theirs.ring)
            except RingError as error:
                note = str(error)
        if dial.ring is None and TCP not in possible:
            raise PeerRefusedError(f"carrier: shared_memory only, and {note or 'no ring is there'}")
        dial.carrier = TCP if dial.ring is None else SHARED_MEMORY
        self._notices.append(Joined(dial.peer, dial.carrier, note))
        if theirs.ring_bytes:
            self._about(dial, Kind.CHOICE, frame.reason_payload(dial.carrier))

    def receive_bulk(self, now: float) -> tuple[PeerKey, memoryview] | None:
        # Read where ZeroMQ put it: its buffer already holds just this frame, and copying it to a
        # slot of ours would cost as much again as the scatter.
        self._read()
        for _ in range(len(self._turn)):
            self._turn.rotate(-1)
            dial = self._dials[self._turn[0]]
            try:
                self._current = dial.bulk.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                continue
            dial.heard = now
            message = memoryview(self._current.buffer)
            place = read_doorbell(message) if dial.ring is not None else None
            if place is None:
                return dial.peer, message
            assert dial.ring is not None
            self._reading = dial
            try:
                return dial.peer, dial.ring.slice(*place)
            except RingError as error:
                self._lose(dial, str(error))
                return None
        self._current = None
        for dial in list(self._dials.values()):
            self._release(dial)
        return None

    def _read(self) -> None:
        """The view that was given out last is not used any more."""
        dial, self._reading = self._reading, None
        if dial is not None:
            dial.unreleased += 1
            if dial.unreleased >= RELEASE_BATCH:
                self._release(dial)

    def _release(self, dial: _Dial) -> None:
        frames, dial.unreleased = dial.unreleased, 0
        if frames:
            self._about(dial, Kind.RELEASE, frame.release_payload(frames))

    def _about(self, dial: _Dial, kind: Kind, payload: bytes = b"") -> None:
        """A frame about the connection; that it is gone is told by a notice."""
        with contextlib.suppress(PeerGoneError):
            self.send_control(dial.peer, to_peer(kind, self._me.epoch, dial.peer, payload))

    def _lose(self, dial: _Dial, reason: str, *, refused: bool = False) -> None:
        if self._dials.pop(dial.peer, None) is None:
            return
        self._turn.remove(dial.peer)
        if self._reading is dial:
            self._reading = None
        dial.close()
        self._notices.append(Lost(dial.peer, reason, refused))

    def notices(self, now: float) -> list[Notice]:
        for dial in list(self._dials.values()):
            if dial.ended:
                self._lose(dial, "the connection ended" if dial.live else "nobody listens there")
            elif now - dial.heard > self._timing.silence_seconds:
                what = "nothing heard" if dial.live else "no answer to the greeting"
                self._lose(dial, f"{what} for {now - dial.heard:.1f} s")
            elif dial.live and now >= dial.next_ping:
                dial.next_ping = now + self._timing.ping_seconds
                self._about(dial, Kind.PING)
        taken, self._notices = self._notices, []
        return taken

    def close(self) -> None:
        self._current = self._reading = None
        for dial in self._dials.values():
            dial.close()
        self._dials.clear()
        self._turn.clear()
