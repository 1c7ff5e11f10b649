"""The staging ring: where KV is packed before it moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..plane.cache_port import Buffer
from ..wire.frame import HEADER_BYTES, Message

DEFAULT_SLOT_BYTES = 1 << 20
_NO_HEADER = bytes(HEADER_BYTES)


class AnySlot(Protocol):
    """Room for one frame. ``offset`` is where a peer that reads it in the ring finds it."""

    @property
    def index(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def head(self) -> memoryview: ...

    @property
    def payload(self) -> Buffer: ...

    def message(self, length: int) -> Message:
        """The frame with so many bytes of payload."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Header and payload lie together, so that one send moves both."""

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


S = TypeVar("S", bound=AnySlot)


class Ring(Generic[S]):
    """Equal slots for ``payload_bytes`` each. Every slot is free or held by one frame."""

    def __init__(self, slots: Sequence[S], payload_bytes: int) -> None:
        if len(slots) < 2 or payload_bytes < 1:
            raise ValueError(
                f"a ring of {len(slots)} slots of {payload_bytes} bytes; 2 of 1 at least"
            )
        self.payload_bytes = payload_bytes
        self._slots = slots
        # Last in, first out: what was used last is still in the cache.
        self._free = list(reversed(range(len(slots))))
        self._held: set[int] = set()

    @property
    def total(self) -> int:
        return len(self._slots)

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self) -> S | None:
        """A free slot, or None: then wait until a frame has left.

        Its header is wiped before anything else is written, so that a reader in another process
        that was given up for lost, and is not, can see that the frame is no more.
        """
        if not self._free:
            return None
        index = self._free.pop()
        self._held.add(index)
        slot = self._slots[index]
        slot.head[:] = _NO_HEADER
        return slot

    def release(self, slot: S) -> None:
        if slot.index not in self._held:
            raise ValueError(f"slot {slot.index} is not held; it was released before")
        self._held.remove(slot.index)
        self._free.append(slot.index)

    def check_conserved(self, held: int) -> None:
        """free + held == total, and the frames in flight account for every held slot."""
        if self.free + held != self.total or len(self._held) != held:
            raise AssertionError(
                f"staging slots leaked: {self.free} free, {len(self._held)} held, "
                f"{held} accounted for, {self.total} in all"
            )


class StagingRing(Ring[Slot]):
    """A fixed run of bytes, cut into equal slots.

    ``memory`` lets the owner bring pinned or shared memory; otherwise the ring allocates its own.
    """

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
            raise ValueError(f"{len(view)} bytes hold no {slots} slots of {stride}")
        size = HEADER_BYTES + payload_bytes
        cut = [Slot(i, i * stride, view[i * stride : i * stride + size]) for i in range(slots)]
        super().__init__(cut, payload_bytes)

    @staticmethod
    def stride(payload_bytes: int) -> int:
        """Bytes from one slot to the next: whole cache lines, so that slots share none."""
        return -(-(HEADER_BYTES + payload_bytes) // 64) * 64
