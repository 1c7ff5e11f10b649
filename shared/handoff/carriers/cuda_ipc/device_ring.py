"""Rings in GPU memory, for connections between two processes of one host.

The sender's ring is exported once. The receiver opens it on connecting, and copies each payload
into its own slot. It verifies and scatters the copy, which the sender cannot change, in the same
stream, and gives the sender's slot back when all of that is over. Headers are never in GPU memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ...wire.buffer import Buffer
from ...wire.frame import HEADER_BYTES, DeviceFrame
from ..device import Device, DeviceDriver, DeviceError
from ..staging import Ring

# Enough for copies of any width and for the sums of a frame.
_ALIGNMENT = 512

log = logging.getLogger("tandem.handoff")


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Exported memory of a device. ``device`` names the GPU."""

    device: str
    handle: bytes
    bytes: int


class _Memory:
    """An allocation of this process. If exported, others open it by its ``handle``."""

    def __init__(self, device: Device, size: int, *, export: bool = False) -> None:
        """Raises ``DeviceError``."""
        self.bytes = size
        self._driver = device.driver
        self.address = self._driver.allocate(size)
        try:
            self.handle = self._driver.export(self.address) if export else b""
            self.view = device.view(self.address, size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            _give_up(self._driver.free, address)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlot:
    """A slot with its header in host memory and its payload at ``offset`` of the ring."""

    index: int
    offset: int
    head: memoryview
    payload: Buffer
    sums: Callable[[Buffer], bytes]

    def message(self, length: int) -> DeviceFrame:
        return DeviceFrame(self.head, self.payload[:length], self.sums)


class DeviceRing(Ring[DeviceSlot]):
    """The sender's side of a ring."""

    def __init__(self, device: Device, *, slots: int, payload_bytes: int) -> None:
        """Raises ``DeviceError``."""
        stride = -(-payload_bytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = memory = _Memory(device, slots * stride, export=True)
        self.place = DevicePlace(device.driver.identity, memory.handle, memory.bytes)
        ring_slots = [
            DeviceSlot(
                index,
                index * stride,
                memoryview(bytearray(HEADER_BYTES)),
                memory.view[index * stride : index * stride + payload_bytes],
                device.sums,
            )
            for index in range(slots)
        ]
        super().__init__(ring_slots, payload_bytes)

    def close(self) -> None:
        self._memory.close()


class OpenedRing:
    """A receiver's side of a ring."""

    def __init__(self, driver: DeviceDriver, place: DevicePlace) -> None:
        """Raises ``DeviceError``."""
        self._driver = driver
        self._bytes = place.bytes
        try:
            self._address = driver.open(place.handle, place.bytes)
        except DeviceError as error:
            raise DeviceError(
                f"cannot open memory of {place.device} from {driver.identity}: {error}"
            ) from None

    def at(self, offset: int, length: int) -> int:
        """The address of a range. Raises ``DeviceError`` for a range outside the ring."""
        if offset + length > self._bytes:
            raise DeviceError(
                f"bytes {offset} to {offset + length} of a device's ring of {self._bytes}"
            )
        return self._address + offset

    def close(self) -> None:
        address, self._address = self._address, 0
        if address:
            _give_up(self._driver.close, address)


def _give_up(release: Callable[[int], None], address: int) -> None:
    """Release memory. A failure is only logged, since nothing needs the memory any more."""
    try:
        release(address)
    except DeviceError as error:
        log.warning("device memory is not released: %s", error)


class DeviceReceiveBuffer:
    """The slot to which a rank copies frames, one at a time. A frame is valid until the next one
    from any peer."""

    def __init__(self, device: Device, payload_bytes: int) -> None:
        """Raises ``DeviceError``."""
        self._device = device
        self._memory = _Memory(device, payload_bytes)

    def open(self, place: DevicePlace) -> OpenedRing:
        return OpenedRing(self._device.driver, place)

    def take(self, ring: OpenedRing, offset: int, length: int, head: bytes) -> DeviceFrame:
        """Begin to copy the payload at ``offset`` of a peer's ring, which the peer may reuse after
        ``settle``. Raises ``DeviceError``."""
        if not 0 < length <= self._memory.bytes:
            raise DeviceError(
                f"a frame with {length} bytes of payload; the limit is {self._memory.bytes}"
            )
        self._device.driver.copy(self._memory.address, ring.at(offset, length), length)
        return DeviceFrame(memoryview(head), self._memory.view[:length], self._device.sums)

    def settle(self) -> None:
        """Wait for the copy of the last frame. Raises ``DeviceError``."""
        self._device.driver.settle()

    def close(self) -> None:
        self._memory.close()
