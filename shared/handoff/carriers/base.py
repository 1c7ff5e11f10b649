"""The boundary between the transfer's state machines and what moves the bytes.

A carrier has two ends. The listener belongs to the sending rank: it accepts greetings and gives out
frames from the staging ring. The dialer belongs to the receiving rank: it connects, greets, and
hands over each frame as a view: of what came over TCP, of the sender's ring, or of what was read
out of it into memory here, which may be a device's.

All methods are called from the data-plane thread and none of them waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ...causes import Cause
from ...errors import TransferError
from ..wire.frame import Message
from ..wire.greeting import PeerKey

# More than any ring has.
MAX_SLOTS = 1 << 32


class PeerGoneError(TransferError):
    """There is no live connection to this peer."""

    cause = Cause.PEER_LOST


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a sending rank listens; both empty when it does not. ``key``: its public CURVE key, if
    the data plane is locked. ``guarded``: if not, its epoch opens it; older ones are open to all.
    """

    bulk: str = ""
    control: str = ""
    key: str = ""
    guarded: bool = True


@dataclass(frozen=True, slots=True)
class Joined:
    """Greeted in both directions, and agreed on a carrier. ``note``: why not on a better one."""

    peer: PeerKey
    carrier: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection ended. ``refused``: no later connection can succeed either. ``full``: there
    was no place for it, and there may be one later."""

    peer: PeerKey
    reason: str
    refused: bool = False
    full: bool = False

    @property
    def cause(self) -> Cause:
        """What fails the transfers that the connection carried."""
        if self.full:
            return Cause.NO_PLACE
        return Cause.REFUSED if self.refused else Cause.PEER_LOST


Notice = Joined | Lost


class Departure(Protocol):
    """A frame on its way out of a staging slot."""

    @property
    def done(self) -> bool:
        """The slot may be written again."""


class Carrier(Protocol):
    """What both ends share."""

    def sockets(self) -> Iterable[Any]:
        """What a zmq.Poller can wait for."""

    @property
    def needs_polling(self) -> bool:
        """Whether something is under way of whose end none of the ``sockets`` tells."""

    def is_live(self, peer: PeerKey) -> bool: ...

    def on_device(self, peer: PeerKey) -> bool:
        """Whether its frames move from one device's memory to another's."""

    def live(self) -> Counter[str]:
        """How many live connections use each carrier."""

    def send_control(self, peer: PeerKey, message: bytes) -> None:
        """Send a small frame; raises PeerGoneError."""

    def receive_control(self, now: float) -> list[tuple[PeerKey, bytes]]:
        """Small frames that have come, at most a fixed number; bounded, not yet parsed."""

    def notices(self, now: float) -> list[Notice]:
        """Who joined or was lost since the last call; also sends pings that are due."""

    def close(self) -> None: ...


class Listener(Carrier, Protocol):
    """The sending rank's end."""

    def start(self) -> Endpoints: ...

    def admit(self, keys: Iterable[str]) -> None:
        """From now on let in dialers with these CURVE keys, and no others, if this end is locked;
        otherwise anybody may come."""

    def send_bulk(self, peer: PeerKey, message: Message, offset: int | None = None) -> Departure:
        """Send a frame without copying it; raises PeerGoneError. ``offset``: it lies there in the
        staging ring, which the peer may have mapped. Data goes to a peer ``on_device`` out of the
        ring in our device's memory."""

    def slots_for(self, peer: PeerKey) -> int:
        """How many slots of the ring frames for this peer may hold at once; whoever waits for one
        of them is woken through ``sockets`` when that is fewer than ``MAX_SLOTS``."""


class Dialer(Carrier, Protocol):
    """The receiving rank's end."""

    def connect(self, peer: PeerKey, endpoints: Endpoints, now: float) -> None:
        """Begin to connect and greet, unless that is done or under way."""

    def receive_bulk(self, now: float) -> tuple[PeerKey, Message] | None:
        """The next frame, fair among peers; the view is valid until the next call."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What makes the two ends of a rank, with the arguments of ``ZmqListener`` and ``ZmqDialer``.

    Each is called, and what it makes is used, on the data-plane thread.
    """

    listener: Callable[..., Listener]
    dialer: Callable[..., Dialer]
