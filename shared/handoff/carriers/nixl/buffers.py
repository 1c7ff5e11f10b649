"""Buffers for frames that a rank reads out of its peers' rings: a few slots, registered once.

A slot stays in use while a read may still write to it, even an abandoned one. So the slots of a
lost peer are freed when its reads are over, and only then is the peer removed from the agent. As in
the staging ring, no peer may use more slots than are free.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass

from ...wire.frame import HEADER_BYTES
from ..staging import StagingRing, StagingSlot
from .agent import NixlAgent, NixlError, NixlPlace, ReadHandle

RECEIVE_SLOTS = 16


@dataclass(frozen=True, slots=True)
class FrameRead:
    """A frame that is read into a slot."""

    slot: StagingSlot
    length: int
    handle: ReadHandle

    @property
    def frame(self) -> memoryview:
        return self.slot.buffer[: self.length]


class ReceiveBuffers:
    """The slots of one rank, and the peers that it reads from."""

    def __init__(self, agent: NixlAgent, frame_bytes: int) -> None:
        """Raises ``StartupError``."""
        self._agent = agent
        self._frame_bytes = frame_bytes
        payload = frame_bytes - HEADER_BYTES
        memory = memoryview(mmap.mmap(-1, RECEIVE_SLOTS * StagingRing.stride(payload)))
        self._ring = StagingRing(slots=RECEIVE_SLOTS, payload_bytes=payload, memory=memory)
        self._address = agent.register(memory).place.address
        self._ending: dict[str, list[FrameRead]] = {}

    def add(self, name: str, place: NixlPlace) -> None:
        """Begin to read from a peer. Raises ``NixlError``."""
        self.reap()
        if name in self._ending:
            raise NixlError(f"reads of the last connection to {name} are not over")
        self._agent.add(name, place.description)

    def read(self, name: str, address: int, length: int, in_use: int) -> FrameRead | None:
        """Begin to read a frame of a peer, which has ``in_use`` slots already; None if there is no
        slot for it yet. Raises ``NixlError``."""
        if not 0 < length <= self._frame_bytes:
            raise NixlError(f"a frame of {length} bytes; the limit is {self._frame_bytes}")
        slot = self._ring.acquire() if in_use < self._ring.free else None
        if slot is None:
            return None
        try:
            handle = self._agent.read(name, address, self._address + slot.offset, length)
        except NixlError:
            self._ring.release(slot)
            raise
        return FrameRead(slot, length, handle)

    def free(self, read: FrameRead) -> None:
        """Free the slot of a read that is over and whose frame is no longer used."""
        read.handle.release()
        self._ring.release(read.slot)

    def remove(self, name: str, under_way: Iterable[FrameRead]) -> None:
        """Stop reading from a peer, once the reads under way are over."""
        self._ending[name] = list(under_way)
        self.reap()

    def reap(self) -> None:
        """Remove peers whose reads are over from the agent."""
        for name, reads in list(self._ending.items()):
            over = [read for read in reads if read.handle.over()]
            for read in over:
                reads.remove(read)
                self.free(read)
            if not reads:
                del self._ending[name]
                self._agent.remove(name)

    def close(self) -> None:
        """Release all peers, even with unfinished reads: the memory is about to go away."""
        for name, reads in self._ending.items():
            self._agent.remove(name)
            for read in reads:
                self.free(read)
        self._ending.clear()
        self._ring.check_conserved(0)
