"""A carrier: one way for frames to get from the sending to the receiving rank of a connection.

A kind of carrier is a subclass of ``Carrier`` in a folder of its own. Each rank has one instance,
which makes a ``FrameWriter`` (on the sending rank) or a ``FrameReader`` (on the receiving rank) for
each connection.

Everything here runs on the data-plane thread and never blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ...errors import TransferError
from ..wire.frame import Message
from ..wire.greeting import PeerKey
from .staging import HOST_WINDOW_BYTES, HostMemory, Ring, StagingRing

if TYPE_CHECKING:
    import zmq

    from .device import Device

# No limit: more than any ring has.
MAX_SLOTS = 1 << 32
# Frames that one peer may read in our ring at once. More would be evicted from the CPU's cache
# before they are read: two Zen 3 cores move 10 GB/s with 4 to 6 frames of 1 MiB, and 6 GB/s with
# 32.
MAX_LOANS = 6


class CarrierUnavailableError(TransferError):
    """This rank cannot use a carrier, but maybe another one. ``usual``: not worth a warning."""

    def __init__(self, message: str, *, usual: bool = False) -> None:
        super().__init__(message)
        self.usual = usual


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResources:
    """The resources that a rank shares with its carriers. ``sends`` False: it only receives.

    ``memory`` backs the staging ``ring``. ``device``: the GPU with the cache, if any.
    """

    me: PeerKey
    sends: bool
    memory: HostMemory
    ring: StagingRing
    max_frame_bytes: int
    device: Device | None
    device_slots: int
    device_slot_bytes: int


@dataclass(frozen=True, slots=True)
class SendChannel:
    """The sending rank's side of a connection. Frames for the peer may go to ``socket``, preceded
    by the peer's ``identity``."""

    connection: int
    socket: zmq.Socket[bytes]
    identity: bytes


@dataclass(frozen=True, slots=True)
class ReceiveChannel:
    """The receiving rank's side of a connection. ``give_back`` tells the sender that its oldest
    loans frame has been read."""

    connection: int
    peer: PeerKey
    socket: zmq.Socket[bytes]
    give_back: Callable[[], None]


class SendHandle(Protocol):
    """A frame on its way out of a staging slot."""

    @property
    def done(self) -> bool:
        """True when the slot may be written again."""


class FrameWriter(Protocol):
    """Sends frames over one connection."""

    slots: int  # ring slots that frames for the peer may use at once
    loans: Loans
    offer: bytes  # for the peer, in the reply to its greeting

    @property
    def needs_polling(self) -> bool:
        """True if ``poll`` may have work while no descriptor is readable."""

    def start(self) -> None:
        """The peer has chosen this carrier."""

    def descriptors(self) -> list[int]:
        """Readable when ``poll`` has work."""

    def write(self, message: Message, offset: int | None) -> SendHandle:
        """Send a frame; ``offset`` is its place in the ring, if it is there.

        Raises ``ZMQError`` or ``OSError`` when the connection is gone.
        """

    def poll(self) -> None:
        """Reclaim frames that were read. Raises ``EOFError``, ``OSError`` or ``TransferError`` when
        the connection is gone."""

    def close(self) -> None: ...


class FrameReader(Protocol):
    """Receives frames over one connection. Any ``TransferError`` ends the connection."""

    @property
    def needs_polling(self) -> bool:
        """True if a frame may come while no descriptor is readable."""

    def descriptors(self) -> list[Any]:
        """Readable when ``read`` may have a frame."""

    def read(self, now: float) -> Message | None:
        """The next frame, if it has arrived; valid until ``release``."""

    def release(self) -> None:
        """Release the frame of the last ``read``."""

    def close(self) -> None: ...


class Carrier:
    """A kind of carrier (the class) on one rank (an instance).

    Instances are created on the data-plane thread, from ``RankResources``. The constructor raises
    ``CarrierUnavailableError`` if this rank cannot use the carrier.
    """

    name: ClassVar[str]
    # Both ranks must be processes of one host that can open each other's memory.
    one_host: ClassVar[bool] = False
    # Used only if --carrier names it, never by auto.
    on_request: ClassVar[bool] = False
    # Always available, so it needs no offer, and no choice if it is the only one.
    baseline: ClassVar[bool] = False
    # A peer that is unreachable now may be reachable later.
    retriable: ClassVar[bool] = False
    # The default limit of a transfer's bytes in flight.
    window_bytes: ClassVar[int] = HOST_WINDOW_BYTES

    def __init__(self, rank: RankResources) -> None:
        self.ring: Ring[Any] = rank.ring  # frames for its peers are packed here

    @classmethod
    def check(cls, *, insecure: bool) -> None:
        """Check ``--carrier`` before anything is loaded. ``insecure``: the network is trusted.
        Raises ``UsageError`` or ``StartupError``."""

    @classmethod
    def prepare(cls) -> None:
        """Load slow libraries before the data plane starts. Raises ``StartupError``."""

    @classmethod
    def host_memory(cls, size: int) -> HostMemory | None:
        """Memory for the staging ring that peers can access; None if any memory will do. Raises
        ``CarrierUnavailableError``."""
        return None

    def hello(self) -> bytes:
        """The offer in the greeting of a receiving rank."""
        return b""

    def writer(self, channel: SendChannel, hello: bytes) -> FrameWriter:
        """Prepare to send to a peer with this ``hello``. Raises ``OSError``, or ``TransferError``
        if the two ranks cannot use this carrier."""
        raise NotImplementedError

    def reader(self, channel: ReceiveChannel, offer: bytes) -> FrameReader:
        """Begin to receive, given the ``offer`` of the peer's writer. Raises ``TransferError``."""
        raise NotImplementedError

    def tick(self) -> None:
        """Called ten times a second, or more often."""

    def close(self) -> None:
        """Free resources. All connections are already closed."""


@dataclass(slots=True)
class Loan:
    """A frame in our ring, while the peer reads it there."""

    done: bool = False


class Loans:
    """The frames that one peer has not given back yet, oldest first."""

    def __init__(self) -> None:
        self._loans: deque[Loan] = deque()

    def __len__(self) -> int:
        return len(self._loans)

    def lend(self) -> SendHandle:
        self._loans.append(Loan())
        return self._loans[-1]

    def give_back(self, frames: int) -> None:
        """End the oldest loans. Raises ``TransferError`` if there are fewer."""
        if frames > len(self._loans):
            raise TransferError(f"it gave back {frames} frames of {len(self._loans)}")
        for _ in range(frames):
            self._loans.popleft().done = True

    def reclaim(self) -> None:
        """Reclaim the frames of a lost peer. It may still read them, but its checksums will fail,
        and the transfer has failed here."""
        self.give_back(len(self._loans))
