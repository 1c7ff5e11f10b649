"""A carrier: one way for frames to get from the sending to the receiving rank of a connection.

A kind of carrier is a subclass of ``Carrier``, and lives in one folder. An instance is what one
rank holds of it. For each connection it makes a ``FrameWriter`` on the sending rank or a
``FrameReader`` on the receiving one.

All of it is used on the data-plane thread, and nothing waits.
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

# More than any ring has.
MAX_SLOTS = 1 << 32
# Frames that a peer may have in our ring at once. With more, they have left the cache when it reads
# them: two Zen 3 cores move 10 GB/s with 4 to 6 frames of 1 MiB, and 6 GB/s with 32.
LENT_FRAMES = 6


class CarrierUnavailableError(TransferError):
    """This rank cannot use a carrier; another one may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResources:
    """What a rank provides to its carriers. ``sends`` False: it only receives.

    ``memory`` is under the staging ``ring``. ``device``: the GPU that the cache lives on, if any.
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
    """A connection as the sending rank has it: frames for the peer may go to ``socket``, after the
    ``identity`` that it has there."""

    connection: int
    socket: zmq.Socket[bytes]
    identity: bytes


@dataclass(frozen=True, slots=True)
class ReceiveChannel:
    """A connection as the receiving rank has it. ``give_back`` tells the sender that its oldest
    lent frame has been read."""

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

    slots: int  # slots of the ring that frames for the peer may hold at once
    lent: LentFrames
    offer: bytes  # for the peer, in the answer to its greeting

    @property
    def needs_polling(self) -> bool:
        """True if ``poll`` may have work that no descriptor announces."""

    def start(self) -> None:
        """The peer has chosen this carrier."""

    def descriptors(self) -> list[int]:
        """Readable when ``poll`` has work."""

    def write(self, message: Message, offset: int | None) -> SendHandle:
        """Send a frame, which lies at ``offset`` of the ring if that is given.

        Raises ``ZMQError`` or ``OSError`` when the connection is gone.
        """

    def poll(self) -> None:
        """Take back frames that were read. Raises ``EOFError``, ``OSError`` or ``TransferError``
        when the connection is gone."""

    def close(self) -> None: ...


class FrameReader(Protocol):
    """Receives frames over one connection. Any ``TransferError`` ends the connection."""

    @property
    def needs_polling(self) -> bool:
        """True if a frame may come that no descriptor announces."""

    def descriptors(self) -> list[Any]:
        """Readable when ``read`` may have a frame."""

    def read(self, now: float) -> Message | None:
        """The next frame, if it is here; valid until ``release``."""

    def release(self) -> None:
        """The frame of the last ``read`` is no longer used."""

    def close(self) -> None: ...


class Carrier:
    """A kind of carrier (the class), and what one rank holds of it (an instance).

    An instance is made on the data-plane thread; its constructor takes ``RankResources`` and raises
    ``CarrierUnavailableError`` where this rank cannot use the carrier.
    """

    name: ClassVar[str]
    # Both ranks must be processes of one host that can open each other's memory.
    one_host: ClassVar[bool] = False
    # Used only when --carrier names it.
    on_request: ClassVar[bool] = False
    # Every version has it, so it needs no offer, and no choice where it is the only one.
    baseline: ClassVar[bool] = False
    # A peer that it cannot reach now may be reached later.
    retriable: ClassVar[bool] = False
    # Bytes of a transfer on the way, unless the transfer says otherwise.
    window_bytes: ClassVar[int] = HOST_WINDOW_BYTES

    def __init__(self, rank: RankResources) -> None:
        self.ring: Ring[Any] = rank.ring  # frames for its peers are packed here

    @classmethod
    def check(cls, *, insecure: bool) -> None:
        """Check a choice by ``--carrier``, before anything is loaded. ``insecure``: the network is
        trusted. Raises ``UsageError`` or ``StartupError``."""

    @classmethod
    def prepare(cls) -> None:
        """Load what takes longer than a start may. Raises ``StartupError``."""

    @classmethod
    def host_memory(cls, size: int) -> HostMemory | None:
        """Memory for the staging ring that peers can reach; None: any will do. Raises
        ``CarrierUnavailableError``."""
        return None

    def hello(self) -> bytes:
        """Offered in the greeting of a receiving rank."""
        return b""

    def writer(self, channel: SendChannel, hello: bytes) -> FrameWriter:
        """Prepare to send to a peer that said ``hello``. Raises ``OSError``, or ``TransferError``
        when the two cannot use this carrier."""
        raise NotImplementedError

    def reader(self, channel: ReceiveChannel, offer: bytes) -> FrameReader:
        """Begin to receive from a peer by the ``offer`` of its writer. Raises ``TransferError``."""
        raise NotImplementedError

    def tick(self) -> None:
        """Called in each round of the loop."""

    def close(self) -> None:
        """Free what the rank holds. All connections have been closed."""


@dataclass(slots=True)
class LentFrame:
    """A frame that the peer reads in our ring."""

    done: bool = False


class LentFrames:
    """Frames in the ring that one peer has not given back yet, oldest first."""

    def __init__(self) -> None:
        self._lent: deque[LentFrame] = deque()

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self) -> SendHandle:
        self._lent.append(LentFrame())
        return self._lent[-1]

    def give_back(self, frames: int) -> None:
        """Raises ``TransferError`` when fewer are lent."""
        if frames > len(self._lent):
            raise TransferError(f"it gave back {frames} frames of {len(self._lent)}")
        for _ in range(frames):
            self._lent.popleft().done = True

    def reclaim(self) -> None:
        """Take back the frames of a lost peer. It may still read them: then its checksums fail, and
        the transfer, which has failed here, can never be confirmed there."""
        self.give_back(len(self._lent))
