"""The staging ring: KV is packed into its slots before it moves."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..wire.buffer import Buffer
from ..wire.frame import HEADER_BYTES, Message
from .device import DeviceDriver, DeviceError

# With half as much, a transfer over TCP is a tenth slower: each frame wakes four threads.
DEFAULT_SLOT_BYTES = 2 << 20
# The default limit of a transfer's bytes in flight, for frames in host memory.
HOST_WINDOW_BYTES = 8 << 20
_NO_HEADER = bytes(HEADER_BYTES)
_LINE = 64
# The offset of payloads in a slot: on a cache line, with the header right before it.
_PAYLOAD_AT = -(-HEADER_BYTES // _LINE) * _LINE

log = logging.getLogger("tandem.handoff")


class RingSlot(Protocol):
    """Room for one frame. ``offset`` is its place in the ring, for peers that read it there."""

    @property
    def index(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def head(self) -> memoryview: ...

    @property
    def payload(self) -> Buffer: ...

    def message(self, length: int) -> Message:
        """The frame with ``length`` bytes of payload."""


@dataclass(frozen=True, slots=True)
class StagingSlot:
    """A slot with header and payload together, so that one send moves both."""

    index: int
    offset: int
    buffer: memoryview

    @property
    def head(self) -> memoryview:
        return self.buffer[:HEADER_BYTES]

    @property
    def payload(self) -> memoryview:
        return self.buffer[HEADER_BYTES:]

    def message(self, length: int) -> memoryview:
        return self.buffer[: HEADER_BYTES + length]


S = TypeVar("S", bound=RingSlot)


class Ring(Generic[S]):
    """Equal slots for ``payload_bytes`` each. Every slot is free or in use by one frame."""

    def __init__(self, slots: Sequence[S], payload_bytes: int) -> None:
        if len(slots) < 2 or payload_bytes < 1:
            raise ValueError(
                f"a ring of {len(slots)} slots of {payload_bytes} bytes; it needs 2 slots of 1 byte"
            )
        self.payload_bytes = payload_bytes
        self._slots = slots
        # Last in, first out: the most recently used slot is still in the CPU's cache.
        self._free = list(reversed(range(len(slots))))
        self._in_use: set[int] = set()

    @property
    def total(self) -> int:
        return len(self._slots)

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self) -> S | None:
        """A free slot, or None while there is none.

        Its header is wiped first, so that a reader in another process, wrongly considered lost, can
        see that its frame is gone.
        """
        if not self._free:
            return None
        index = self._free.pop()
        self._in_use.add(index)
        slot = self._slots[index]
        slot.head[:] = _NO_HEADER
        return slot

    def release(self, slot: S) -> None:
        if slot.index not in self._in_use:
            raise ValueError(f"slot {slot.index} is not in use; it was released before")
        self._in_use.remove(slot.index)
        self._free.append(slot.index)

    def check_conserved(self, in_use: int) -> None:
        """Raise ``AssertionError`` unless ``in_use`` slots are in use and all others are free."""
        if self.free + in_use != self.total or len(self._in_use) != in_use:
            raise AssertionError(
                f"staging slots leaked: {self.free} free, {len(self._in_use)} in use, "
                f"{in_use} accounted for, {self.total} in all"
            )


class StagingRing(Ring[StagingSlot]):
    """Equal slots in one contiguous ``memory``, allocated by default."""

    def __init__(
        self,
        *,
        slots: int,
        payload_bytes: int = DEFAULT_SLOT_BYTES,
        memory: memoryview | None = None,
    ) -> None:
        stride = self.stride(payload_bytes)
        view = memoryview(bytearray(slots * stride)) if memory is None else memory.cast("B")
        if len(view) < slots * stride:
            raise ValueError(f"{len(view)} bytes are too few for {slots} slots of {stride}")
        size, lead = HEADER_BYTES + payload_bytes, _PAYLOAD_AT - HEADER_BYTES
        starts = [index * stride + lead for index in range(slots)]
        ring_slots = [StagingSlot(i, at, view[at : at + size]) for i, at in enumerate(starts)]
        super().__init__(ring_slots, payload_bytes)

    @staticmethod
    def stride(payload_bytes: int) -> int:
        """Bytes from one slot to the next: whole cache lines, so that slots share none."""
        return _PAYLOAD_AT + -(-payload_bytes // _LINE) * _LINE


class HostMemory(Protocol):
    """Memory under a staging ring."""

    memory: memoryview

    def close(self) -> None: ...


class PrivateMemory:
    """Memory that no other process can map."""

    def __init__(self, size: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, size))

    def close(self) -> None:
        """No-op: the memory is freed with its last view."""


class PinnedMemory:
    """Pinned memory, which a GPU accesses directly and several times faster."""

    def __init__(self, driver: DeviceDriver, memory: memoryview) -> None:
        """Raises ``DeviceError``."""
        self._driver = driver
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        driver.pin(self._address, len(memory))

    def close(self) -> None:
        try:
            self._driver.unpin(self._address)
        except DeviceError as error:
            log.warning("the staging ring stays pinned: %s", error)


def pinned(driver: DeviceDriver, memory: memoryview) -> PinnedMemory | None:
    """Pin memory; None if that fails, which only makes copies slower."""
    try:
        return PinnedMemory(driver, memory)
    except DeviceError as error:
        log.warning("the staging ring is not pinned (%s): KV leaves the GPU slower", error)
        return None
