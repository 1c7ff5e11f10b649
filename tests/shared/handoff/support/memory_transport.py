"""A transport within one process: no sockets, no threads, and the clock of the test.

It behaves like the real one. Bulk and control are separate lanes; a frame stays in the sender's
slot until the receiver has read it, so a slot that is written too early shows; both ends greet,
ping and detect silence by ``Timing``. ``Network.cut`` pulls a cable: nothing passes any longer, and
neither end is notified. A connection is never re-established.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.shared.errors import PeerRefusedError
from tandem.shared.handoff.carriers.base import MAX_SLOTS, SendHandle
from tandem.shared.handoff.carriers.transport import (
    Endpoints,
    Joined,
    Lost,
    Notice,
    PeerGoneError,
    Transport,
)
from tandem.shared.handoff.carriers.zeromq.sockets import (
    CONTROL_BATCH,
    MAX_CONTROL_MESSAGE,
    Timing,
    about_connection,
    to_peer,
)
from tandem.shared.handoff.wire import greeting
from tandem.shared.handoff.wire.frame import FrameError, Kind
from tandem.shared.handoff.wire.greeting import Greeting, PeerKey

MEMORY = "memory"


@dataclass(slots=True)
class Lent:
    """A message on its way; ``done`` when its memory is no longer read."""

    message: memoryview
    done: bool = False


@dataclass(slots=True)
class MemoryWire:
    """One connection: three lanes. ``cut``: messages are lost; ``open``: the other end exists."""

    bulk: deque[Lent] = field(default_factory=deque)
    to_listener: deque[bytes] = field(default_factory=deque)
    to_dialer: deque[bytes] = field(default_factory=deque)
    open: bool = True
    cut: bool = False

    def put(self, lane: deque[bytes], message: bytes) -> bool:
        """Add a message; ``False`` if the other end is known to be gone."""
        if self.open and not self.cut:
            lane.append(message)
        return self.open

    def lend(self, message: memoryview) -> Lent:
        loan = Lent(message, done=self.cut)
        if not self.cut:
            self.bulk.append(loan)
        return loan

    def empty(self) -> None:
        """Drop the messages in flight, and release their memory."""
        for loan in self.bulk:
            loan.done = True
        for lane in (self.bulk, self.to_listener, self.to_dialer):
            lane.clear()

    def close(self) -> None:
        self.open = False
        self.empty()


class Network:
    """The listeners by address. ``transport`` goes to a data plane."""

    def __init__(self) -> None:
        self.listeners: dict[str, MemoryListener] = {}
        self.wires: list[MemoryWire] = []
        self._numbers = itertools.count(1)

    @property
    def transport(self) -> Transport:
        return Transport(
            lambda context, me, carriers, **of: MemoryListener(self, me, **of),  # type: ignore[arg-type]
            lambda context, me, carriers, **of: MemoryDialer(self, me, **of),
        )

    def new_address(self) -> str:
        return f"memory://{next(self._numbers)}"

    def cut(self) -> None:
        """Cut every present connection."""
        for wire in self.wires:
            wire.cut = True
            wire.empty()


@dataclass(slots=True)
class MemoryLink:
    """An end's side of a connection. ``inbox`` and ``outbox`` are its lanes for control."""

    peer: PeerKey
    wire: MemoryWire
    inbox: deque[bytes]
    outbox: deque[bytes]
    last_heard: float
    next_ping: float = 0.0
    live: bool = False
    max_payload: int = 0
    kv_scales: tuple[float, ...] = ()


class _End:
    """Base of both ends."""

    needs_polling = False

    def __init__(
        self, network: Network, me: Greeting, *, timing: Timing, max_frame_bytes: int = 0, **_: Any
    ) -> None:
        self._network = network
        self._me = me
        self._limit = max_frame_bytes
        self._timing = timing
        self._links: dict[PeerKey, MemoryLink] = {}
        self._notices: list[Notice] = []

    def sockets(self) -> Iterable[Any]:
        return ()

    bulk_sockets = reply_sockets = loan_sockets = sockets

    @property
    def has_notices(self) -> bool:
        return bool(self._notices)

    def is_live(self, peer: PeerKey) -> bool:
        return peer in self._links and self._links[peer].live

    def carrier(self, peer: PeerKey) -> str:
        return MEMORY if self.is_live(peer) else ""

    def live(self) -> Counter[str]:
        return Counter({MEMORY: sum(link.live for link in self._links.values())})

    def send_control(self, peer: PeerKey, message: bytes) -> None:
        link = self._live_link(peer)
        if not link.wire.put(link.outbox, message):
            self.lose(peer, "control connection is gone")
            raise PeerGoneError(f"{peer} is gone")

    def _live_link(self, peer: PeerKey) -> MemoryLink:
        if not self.is_live(peer):
            raise PeerGoneError(f"no live connection to {peer}")
        return self._links[peer]

    def _taken(self, link: MemoryLink, now: float) -> Iterable[bytes]:
        """Control messages of one link; one beyond the limit ends the connection unread."""
        for _ in range(CONTROL_BATCH):
            if not link.inbox:
                return
            message = link.inbox.popleft()
            if len(message) > MAX_CONTROL_MESSAGE:
                link.wire.close()
                return
            link.last_heard = now
            yield message

    def lose(self, peer: PeerKey, reason: str, *, refused: bool = False) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.wire.close()
            self._notices.append(Lost(peer, reason, refused))

    def notices(self, now: float) -> list[Notice]:
        for link in list(self._links.values()):
            if now - link.last_heard > self._timing.silence_seconds:
                self.lose(link.peer, f"nothing heard for {now - link.last_heard:.1f} s")
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        for link in self._links.values():
            link.wire.close()
        self._links.clear()


class MemoryListener(_End):
    """The sending rank's end."""

    unknown_connections = keys_refused = 0
    is_greeting = False

    def __init__(self, network: Network, me: Greeting, **of: Any) -> None:
        super().__init__(network, me, **of)
        self._address = ""
        self._hellos: deque[tuple[bytes, MemoryWire]] = deque()

    def start(self) -> Endpoints:
        self._address = self._network.new_address()
        self._network.listeners[self._address] = self
        return Endpoints(bulk=self._address, control=self._address)

    def admit(self, keys: Iterable[str]) -> None:
        """Every dialer is admitted."""

    def greet(self, hello: bytes, wire: MemoryWire) -> None:
        self._hellos.append((hello, wire))

    def send_bulk(
        self, peer: PeerKey, message: memoryview, offset: int | None = None
    ) -> SendHandle:
        link = self._live_link(peer)
        if not link.wire.open:
            self.lose(peer, "bulk connection is gone")
            raise PeerGoneError(f"{peer} is gone")
        return link.wire.lend(message)

    def slots_for(self, peer: PeerKey) -> int:
        return MAX_SLOTS

    def max_payload(self, peer: PeerKey) -> int:
        return self._links[peer].max_payload

    def kv_scales(self, peer: PeerKey) -> tuple[float, ...]:
        return self._links[peer].kv_scales

    def receive_control(self, now: float) -> list[tuple[PeerKey, bytes]]:
        while self._hellos:
            self._greeted(*self._hellos.popleft(), now)
        messages = []
        for link in list(self._links.values()):
            for message in self._taken(link, now):
                if about_connection(message, link.peer, self._me.epoch, Kind.PING) is None:
                    messages.append((link.peer, message))
                else:
                    pong = to_peer(Kind.PONG, self._me.epoch, link.peer)
                    link.wire.put(link.outbox, pong)
        return messages

    receive_replies = receive_control

    def _greeted(self, hello: bytes, wire: MemoryWire, now: float) -> None:
        try:
            theirs = greeting.decode(hello)
        except FrameError:
            return
        reply = replace(self._me, connection=theirs.connection, peer_epoch=theirs.epoch)
        try:
            greeting.check_epoch(theirs.peer_epoch, self._me.epoch, self._me.node_id)
            greeting.check(self._me, theirs)
        except PeerRefusedError as refusal:
            reply = replace(reply, refused=greeting.refusal_text(refusal))
            wire.put(wire.to_dialer, greeting.encode(reply))
            return
        self.lose(theirs.key, "the peer connected anew")
        link = MemoryLink(theirs.key, wire, wire.to_listener, wire.to_dialer, now, live=True)
        link.max_payload, link.kv_scales = theirs.max_payload, theirs.scales
        self._links[theirs.key] = link
        wire.put(wire.to_dialer, greeting.encode(reply))
        self._notices.append(Joined(theirs.key, MEMORY))

    def close(self) -> None:
        super().close()
        self._network.listeners.pop(self._address, None)


class MemoryDialer(_End):
    """The receiving rank's end."""

    def __init__(self, network: Network, me: Greeting, **of: Any) -> None:
        super().__init__(network, me, **of)
        self._turn: deque[PeerKey] = deque()
        self._reading: Lent | None = None

    def connect(self, peer: PeerKey, endpoints: Endpoints, now: float) -> None:
        if peer in self._links:
            return
        wire = MemoryWire()
        self._network.wires.append(wire)
        self._links[peer] = MemoryLink(peer, wire, wire.to_dialer, wire.to_listener, now)
        self._turn.append(peer)
        listener = self._network.listeners.get(endpoints.bulk)
        if listener is not None:
            hello = replace(self._me, connection=len(self._network.wires), peer_epoch=peer.epoch)
            listener.greet(greeting.encode(hello), wire)

    def receive_control(self, now: float) -> list[tuple[PeerKey, bytes]]:
        messages = []
        for link in list(self._links.values()):
            for message in self._taken(link, now):
                if not link.live:
                    self._handle_reply(link, message)
                elif about_connection(message, link.peer, self._me.epoch, Kind.PONG) is None:
                    messages.append((link.peer, message))
        return messages

    def _handle_reply(self, link: MemoryLink, message: bytes) -> None:
        try:
            theirs = greeting.decode(message)
            if theirs.refused:
                raise PeerRefusedError(theirs.refused)
            greeting.check_epoch(link.peer.epoch, theirs.epoch, theirs.node_id)
            greeting.check(self._me, theirs)
        except PeerRefusedError as refusal:
            self.lose(link.peer, str(refusal), refused=True)
        except FrameError as error:
            self.lose(link.peer, f"bad greeting: {error}")
        else:
            link.live = True
            self._notices.append(Joined(link.peer, MEMORY))

    def receive_bulk(self, now: float) -> tuple[PeerKey, memoryview] | None:
        if self._reading is not None:
            self._reading.done, self._reading = True, None
        for _ in range(len(self._turn)):
            self._turn.rotate(-1)
            link = self._links[self._turn[0]]
            if not link.live or not link.wire.bulk:
                continue
            loan = link.wire.bulk.popleft()
            if len(loan.message) > self._limit:
                loan.done = True
                link.wire.close()
                continue
            link.last_heard = now
            self._reading = loan
            return link.peer, loan.message.toreadonly()
        return None

    def lose(self, peer: PeerKey, reason: str, *, refused: bool = False) -> None:
        if peer in self._links:
            self._turn.remove(peer)
        super().lose(peer, reason, refused=refused)

    def notices(self, now: float) -> list[Notice]:
        for link in list(self._links.values()):
            if link.live and now >= link.next_ping:
                link.next_ping = now + self._timing.ping_seconds
                ping = to_peer(Kind.PING, self._me.epoch, link.peer)
                link.wire.put(link.outbox, ping)
        return super().notices(now)

    def close(self) -> None:
        if self._reading is not None:
            self._reading.done, self._reading = True, None
        super().close()
        self._turn.clear()
