"""The staging ring: where KV is packed before it moves."""

from __future__ import annotations

from dataclasses import dataclass

from .frame import HEADER_BYTES

DEFAULT_SLOT_BYTES = 1 << 20
_NO_HEADER = bytes(HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one frame: header and payload lie together, so that one send moves both.

    ``offset`` is where it begins in the ring's memory.
    """

    index: int
    offset: int
    buffer: memoryview

    @property
    def payload(self) -> memoryview:
        return self.buffer[HEADER_BYTES:]


class StagingRing:
    """A fixed run of bytes, cut into equal slots. Every slot is free or held by one frame.

    ``memory`` lets the owner bring pinned or shared memory; otherwise the ring allocates its own.
    """

    def __init__(
        self,
        *,
        slots: int,
        payload_bytes: int = DEFAULT_SLOT_BYTES,
        memory: memoryview | None = None,
    ) -> None:
        if slots < 2 or payload_bytes < 1:
            raise ValueError(f"a ring of {slots} slots of {payload_bytes} bytes; 2 of 1 at least")
        stride = self.stride(payload_bytes)
        view = memoryview(bytearray(slots * stride)) if memory is None else memory.cast("B")
        if len(view) < slots * stride:
            raise ValueError(f"{len(view)} bytes hold no {slots} slots of {stride}")
        self.payload_bytes = payload_bytes
        self._slots = [
            Slot(i, i * stride, view[i * stride : i * stride + HEADER_BYTES + payload_bytes])
            for i in range(slots)
        ]
        # Last in, first out: what was used last is still in the cache.
        self._free = list(reversed(range(slots)))
        self._held: set[int] = set()

    @staticmethod
    def stride(payload_bytes: int) -> int:
        """Bytes from one slot to the next: whole cache lines, so that slots share none."""
        return -(-(HEADER_BYTES + payload_bytes) // 64) * 64

    @property
    def total(self) -> int:
        return len(self._slots)

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self) -> Slot | None:
        """A free slot, or None: then wait until a frame has left.

        Its header is wiped before anything else is written, so that a reader in another process
        that was given up for lost, and is not, can see that the frame is no more.
        """
        if not self._free:
            return None
        index = self._free.pop()
        self._held.add(index)
        slot = self._slots[index]
        slot.buffer[:HEADER_BYTES] = _NO_HEADER
        return slot

    def release(self, slot: Slot) -> None:
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
