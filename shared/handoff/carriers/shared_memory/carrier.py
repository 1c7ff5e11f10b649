"""The carrier through shared memory: frames stay in the sender's ring, and pipes announce them.

The staging ring is a memfd that the receiver maps; see ``doorbells.py`` for the pipes.
"""

from __future__ import annotations

import struct
from dataclasses import astuple

from ....errors import TransferError
from ...wire.frame import DeviceFrame, Message
from ..base import (
    MAX_LOANS,
    Carrier,
    CarrierUnavailableError,
    FrameReader,
    FrameWriter,
    Loan,
    Loans,
    RankResources,
    ReceiveChannel,
    SendChannel,
    SendHandle,
)
from ..doorbells import DoorbellReader, DoorbellWriter, doorbell, read_doorbell
from ..memfd import MemfdError, can_share
from ..staging import HostMemory
from . import NAME
from .ring import MappedRing, RingPlace, SharedRing

# The ring's place, then the doorbell's descriptor in the same process.
_OFFER = struct.Struct("<IIQQI")


def encode_offer(ring: RingPlace, bell: int) -> bytes:
    return _OFFER.pack(*astuple(ring), bell)


def read_offer(offer: bytes) -> tuple[RingPlace, int]:
    """The ring's place, and the doorbell's descriptor. Raises ``MemfdError``."""
    if len(offer) != _OFFER.size:
        raise MemfdError(f"an offer of {NAME} with {len(offer)} bytes, not {_OFFER.size}")
    *place, bell = _OFFER.unpack(offer)
    return RingPlace(*place), bell


class SharedMemoryCarrier(Carrier):
    name = NAME
    one_host = True

    def __init__(self, rank: RankResources) -> None:
        super().__init__(rank)
        self._limit = rank.max_frame_bytes
        self._place: RingPlace | None = None
        if isinstance(rank.memory, SharedRing):
            self._place = rank.memory.place
        elif rank.sends:
            raise CarrierUnavailableError("another carrier provides the staging memory", usual=True)

    @classmethod
    def host_memory(cls, size: int) -> HostMemory:
        if not can_share():
            raise CarrierUnavailableError("this system has no sealed memfd, or no /proc")
        try:
            return SharedRing(size)
        except OSError as error:
            raise CarrierUnavailableError(str(error)) from None

    def writer(self, channel: SendChannel, hello: bytes) -> FrameWriter:
        assert self._place is not None
        return SharedMemoryWriter(channel.connection, self._place)

    def reader(self, channel: ReceiveChannel, offer: bytes) -> FrameReader:
        return SharedMemoryReader(channel.connection, offer, self._limit)


class SharedMemoryWriter:
    """Announces frames in the ring that the peer has mapped."""

    slots = MAX_LOANS
    needs_polling = False

    def __init__(self, connection: int, place: RingPlace) -> None:
        """Raises ``OSError``."""
        self._bells = DoorbellWriter(connection)
        self.loans = Loans()
        self.offer = encode_offer(place, self._bells.descriptor)

    def start(self) -> None:
        self._bells.opened()

    def descriptors(self) -> list[int]:
        return [self._bells.fileno()]

    def write(self, message: Message, offset: int | None) -> SendHandle:
        assert not isinstance(message, DeviceFrame)
        if offset is None:
            self._bells.ring(message)
            return Loan(done=True)
        self._bells.ring(doorbell(offset, len(message)))
        return self.loans.lend()

    def poll(self) -> None:
        self.loans.give_back(self._bells.count_returns())

    def close(self) -> None:
        self._bells.close()
        self.loans.reclaim()


class SharedMemoryReader:
    """Reads frames in the peer's ring."""

    needs_polling = False

    def __init__(self, connection: int, offer: bytes, max_frame_bytes: int) -> None:
        """Raises ``MemfdError``."""
        place, bell = read_offer(offer)
        self._limit = max_frame_bytes
        self._ring = MappedRing(place)
        self._bells = DoorbellReader(place.pid, bell, connection)
        self._borrowed = False

    def descriptors(self) -> list[int]:
        return [self._bells.fileno()]

    def read(self, now: float) -> memoryview | None:
        record = self._bells.next()
        if record is None:
            return None
        place = read_doorbell(record)
        length = len(record) if place is None else place[1]
        if length > self._limit:
            raise TransferError(f"a frame of {length} bytes; the limit is {self._limit}")
        if place is None:
            return memoryview(record)
        frame = self._ring.slice(*place)
        self._borrowed = True
        return frame

    def release(self) -> None:
        if self._borrowed:
            self._borrowed = False
            self._bells.give_back()

    def close(self) -> None:
        self._bells.close()
