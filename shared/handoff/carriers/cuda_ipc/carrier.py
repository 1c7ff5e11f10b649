"""The carrier from GPU to GPU: payloads are copied out of a ring in the sender's GPU memory.

Pipes announce payloads and carry their headers; see ``doorbells.py``.
"""

from __future__ import annotations

import os
import struct

from ....errors import PeerRefusedError, TransferError
from ...wire.frame import DeviceFrame, Message, printable
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
from ..device import DEVICE_WINDOW_BYTES, Device, DeviceError
from ..doorbells import DoorbellReader, DoorbellWriter, payload_doorbell, read_payload_doorbell
from . import NAME, NO_GPU
from .device_ring import DevicePlace, DeviceReceiveBuffer, DeviceRing

# The version of the checksum of payloads in GPU memory (``kernels/row_sums.py``).
SUMS_VERSION = 1
# The version of the sums, and the bytes of a frame and of the default window, which two releases
# may not share.
_HELLO = struct.Struct("<BQQ")
# The version of the sums, the doorbell's process and descriptor, the ring's bytes, and the lengths
# of the device's name and of the handle, which follow.
_OFFER = struct.Struct("<BIIQBB")


def encode_offer(place: DevicePlace, pid: int, bell: int) -> bytes:
    device = place.device.encode()
    lengths = len(device), len(place.handle)
    return _OFFER.pack(SUMS_VERSION, pid, bell, place.bytes, *lengths) + device + place.handle


def read_offer(offer: bytes) -> tuple[DevicePlace, int, int]:
    """The ring's place, the doorbell's process and its descriptor. Raises ``DeviceError``."""
    if len(offer) < _OFFER.size:
        raise DeviceError(f"an offer of {NAME} with {len(offer)} bytes, not {_OFFER.size} or more")
    sums, pid, bell, size, name_length, handle_length = _OFFER.unpack_from(offer)
    rest = offer[_OFFER.size :]
    if sums != SUMS_VERSION:
        raise DeviceError(f"the peer's {NAME} has checksums of version {sums}, not {SUMS_VERSION}")
    if len(rest) != name_length + handle_length:
        raise DeviceError(
            f"an offer of {NAME} ends in {len(rest)} bytes, not {name_length + handle_length}"
        )
    name, handle = rest[:name_length], rest[name_length:]
    return DevicePlace(printable(name), handle, size), pid, bell


class CudaIpcCarrier(Carrier):
    name = NAME
    one_host = True
    window_bytes = DEVICE_WINDOW_BYTES

    def __init__(self, rank: RankResources) -> None:
        super().__init__(rank)
        if rank.device is None:
            raise CarrierUnavailableError(NO_GPU, usual=True)
        self._limit = rank.max_frame_bytes
        self._slot_bytes = rank.device_slot_bytes
        self._ring: DeviceRing | None = None
        self._buffer: DeviceReceiveBuffer | None = None
        try:
            self._allocate(rank, rank.device)
        except DeviceError as error:
            self.close()
            raise CarrierUnavailableError(str(error)) from None

    def _allocate(self, rank: RankResources, device: Device) -> None:
        self._buffer = DeviceReceiveBuffer(device, rank.device_slot_bytes)
        if rank.sends:
            self.ring = self._ring = DeviceRing(
                device, slots=rank.device_slots, payload_bytes=rank.device_slot_bytes
            )

    def hello(self) -> bytes:
        return _HELLO.pack(SUMS_VERSION, self._slot_bytes, self.window_bytes)

    def writer(self, channel: SendChannel, hello: bytes) -> FrameWriter:
        if hello != self.hello():
            raise PeerRefusedError(
                f"{NAME} of another version: its checksums or the sizes of its frames differ"
            )
        assert self._ring is not None
        return CudaIpcWriter(channel.connection, self._ring.place)

    def reader(self, channel: ReceiveChannel, offer: bytes) -> FrameReader:
        assert self._buffer is not None
        return CudaIpcReader(channel.connection, offer, self._buffer, self._limit)

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
        if self._ring is not None:
            self._ring.close()


class CudaIpcWriter:
    """Announces payloads in our device's ring, with their headers."""

    slots = MAX_LOANS
    needs_polling = False

    def __init__(self, connection: int, place: DevicePlace) -> None:
        """Raises ``OSError``."""
        self._bells = DoorbellWriter(connection)
        self.loans = Loans()
        self.offer = encode_offer(place, os.getpid(), self._bells.descriptor)

    def start(self) -> None:
        self._bells.opened()

    def descriptors(self) -> list[int]:
        return [self._bells.fileno()]

    def write(self, message: Message, offset: int | None) -> SendHandle:
        if not isinstance(message, DeviceFrame):
            self._bells.ring(message)
            return Loan(done=True)
        assert offset is not None
        self._bells.ring(payload_doorbell(offset, len(message.payload), message.head))
        return self.loans.lend()

    def poll(self) -> None:
        self.loans.give_back(self._bells.count_returns())

    def close(self) -> None:
        self._bells.close()
        self.loans.reclaim()


class CudaIpcReader:
    """Copies payloads out of the ring on the peer's device."""

    needs_polling = False

    def __init__(
        self, connection: int, offer: bytes, buffer: DeviceReceiveBuffer, max_frame_bytes: int
    ) -> None:
        """``max_frame_bytes`` limits frames in doorbells. Raises ``DeviceError`` or
        ``MemfdError``."""
        place, pid, bell = read_offer(offer)
        self._limit = max_frame_bytes
        self._buffer = buffer
        self._bells = DoorbellReader(pid, bell, connection)
        self._borrowed = False
        self._failure: DeviceError | None = None
        try:
            self._ring = buffer.open(place)
        except TransferError:
            self._bells.close()
            raise

    def descriptors(self) -> list[int]:
        return [self._bells.fileno()]

    def read(self, now: float) -> Message | None:
        if self._failure is not None:
            raise self._failure
        record = self._bells.next()
        if record is None:
            return None
        place = read_payload_doorbell(record)
        if place is None:
            if len(record) > self._limit:
                raise TransferError(f"a frame of {len(record)} bytes; the limit is {self._limit}")
            return memoryview(record)
        frame = self._buffer.take(self._ring, *place)
        self._borrowed = True
        return frame

    def release(self) -> None:
        if self._borrowed:
            self._borrowed = False
            self._settle()  # at once for a frame that was scattered
            self._bells.give_back()

    def _settle(self) -> None:
        """Wait until nothing is copied out of the peer's ring. The next ``read`` reports an
        error."""
        try:
            self._buffer.settle()
        except DeviceError as error:
            self._failure = error

    def close(self) -> None:
        self._settle()  # before the sender sees the end of the pipe, and may free its memory
        self._bells.close()
        self._ring.close()
