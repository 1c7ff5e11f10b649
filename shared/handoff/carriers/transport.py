"""The boundary between the transfers' state machines and the connections between ranks.

A transport has two ends. The listener belongs to the sending rank: it accepts connections and sends
frames from the staging ring. The dialer belongs to the receiving rank: it connects, greets, and
yields each frame as a view of a message, of the sender's ring, or of local memory, which may be a
GPU's. The two ranks agree on the carrier of each connection.

All methods are called on the data-plane thread, and none of them blocks.
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
from .base import SendHandle


class PeerGoneError(TransferError):
    """There is no live connection to this peer."""

    cause = Cause.PEER_LOST


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a sending rank; both empty if it does not listen. ``key``: its public CURVE
    key if the data plane is locked; otherwise its epoch is the password.
    """

    bulk: str = ""
    control: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class Joined:
    """Both ranks have greeted and agreed on a carrier. ``note``: why no better one works."""

    peer: PeerKey
    carrier: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection ended. ``refused``: no later connection can succeed. ``full``: the peer has no
    room for it now."""

    peer: PeerKey
    reason: str
    refused: bool = False
    full: bool = False

    @property
    def cause(self) -> Cause:
        """The cause of failure of the connection's transfers."""
        if self.full:
            return Cause.NO_PLACE
        return Cause.REFUSED if self.refused else Cause.PEER_LOST


Notice = Joined | Lost


class TransportEnd(Protocol):
    """The part that both ends share."""

    def sockets(self) -> Iterable[Any]:
        """Sockets and descriptors that a zmq.Poller can wait for."""

    @property
    def needs_polling(self) -> bool:
        """True if something is in flight whose end makes none of the ``sockets`` readable."""

    def is_live(self, peer: PeerKey) -> bool: ...

    def carrier(self, peer: PeerKey) -> str:
        """The name of the carrier of a live connection; empty without one."""

    def live(self) -> Counter[str]:
        """Live connections by carrier."""

    def send_control(self, peer: PeerKey, message: bytes) -> None:
        """Send a small frame. Raises ``PeerGoneError``."""

    def receive_control(self, now: float) -> list[tuple[PeerKey, bytes]]:
        """Small frames that have arrived: a bounded number, not yet parsed."""

    @property
    def has_notices(self) -> bool:
        """True if peers have joined or were lost since the last ``notices``, which may find
        more."""

    def notices(self, now: float) -> list[Notice]:
        """Peers that joined or were lost since the last call. Also sends due pings."""

    def close(self) -> None: ...


class Listener(TransportEnd, Protocol):
    """The sending rank's end."""

    unknown_connections: int  # connections that never greeted, as of the last ``notices``
    keys_refused: int  # connections with a wrong CURVE key or password

    def start(self) -> Endpoints: ...

    def admit(self, keys: Iterable[str]) -> None:
        """Admit only dialers with these CURVE keys, if this end is locked."""

    @property
    def is_greeting(self) -> bool:
        """True while a peer has begun to greet."""

    def loan_sockets(self) -> Iterable[Any]:
        """The ``sockets`` on which frames are given back."""

    def reply_sockets(self) -> Iterable[Any]:
        """These, and that of acknowledgements."""

    def receive_replies(self, now: float) -> list[tuple[PeerKey, bytes]]:
        """``receive_control`` of the ``reply_sockets`` alone."""

    def send_bulk(self, peer: PeerKey, message: Message, offset: int | None = None) -> SendHandle:
        """Send a frame without copying it. ``offset``: its place in the ring of the peer's carrier.
        Raises ``PeerGoneError``."""

    def slots_for(self, peer: PeerKey) -> int:
        """Ring slots that frames for this peer may use at once. If fewer than ``MAX_SLOTS``,
        ``sockets`` become readable when a slot is free."""

    def max_payload(self, peer: PeerKey) -> int:
        """The largest payload in bytes that this live peer receives through host memory."""

    def kv_scales(self, peer: PeerKey) -> tuple[float, ...]:
        """The scales of each component of each layer in this live peer's cache; empty if all are
        1."""


class Dialer(TransportEnd, Protocol):
    """The receiving rank's end."""

    def connect(self, peer: PeerKey, endpoints: Endpoints, now: float) -> None:
        """Begin to connect and greet, unless a connection exists already."""

    def bulk_sockets(self) -> Iterable[Any]:
        """The ``sockets`` that are readable only because of frames."""

    def receive_bulk(self, now: float) -> tuple[PeerKey, Message] | None:
        """The next frame, fair among peers; the view is valid until the next call."""


@dataclass(frozen=True, slots=True)
class Transport:
    """Factories for the two ends of a rank, with the arguments of ``ZmqListener`` and
    ``ZmqDialer``. Everything runs on the data-plane thread.
    """

    listener: Callable[..., Listener]
    dialer: Callable[..., Dialer]
