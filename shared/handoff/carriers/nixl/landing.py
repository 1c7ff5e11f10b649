"""Where frames land that a rank reads out of its peers' rings: a few slots, registered once.

A slot is somebody's as long as a read may still write into it, even when nobody waits for that read
any more. So the slots of a peer that was lost come back when its reads are over, and only then is
the peer removed from the agent. As in the staging ring, no peer may hold more slots than are free.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass

from ...wire.frame import HEADER_BYTES
from ..staging import Slot, StagingRing
from .agent import NixlAgent, NixlError, NixlPlace, Reading

LANDING_SLOTS = 16


@dataclass(frozen=True, slots=True)
class Landed:
    """A frame that was read, or is being read, into a slot."""

    slot: Slot
    length: int
    reading: Reading

    @property
    def frame(self) -> memoryview:
        return self.slot.buffer[: self.length]


class Landing:
    """The slots of one rank, and the peers that it reads from."""

    def __init__(self, agent: NixlAgent, frame_bytes: int) -> None:
        """Raises ``StartupError``."""
        self._agent = agent
        self._frame_bytes = frame_bytes
        payload = frame_bytes - HEADER_BYTES
        memory = memoryview(mmap.mmap(-1, LANDING_SLOTS * StagingRing.stride(payload)))
        self._ring = StagingRing(slots=LANDING_SLOTS, payload_bytes=payload, memory=memory)
        self._address = agent.register(memory).place.address
        self._ending: dict[str, list[Landed]] = {}

    def add(self, name: str, place: NixlPlace) -> None:
        """Begin to read from a peer. Raises ``NixlError``."""
        self.reap()
        if name in self._ending:
            raise NixlError(f"reads of the last connection to {name} are not over")
        self._agent.add(name, place.description)

    def read(self, name: str, address: int, length: int, held: int) -> Landed | None:
        """Begin to read a frame of a peer that holds so many slots; ``None`` while there is no
        slot for it. Raises ``NixlError``."""
        if not 0 < length <= self._frame_bytes:
            raise NixlError(f"a frame of {length} bytes; the limit is {self._frame_bytes}")
        slot = self._ring.acquire() if held < self._ring.free else None
        if slot is None:
            return None
        try:
            reading = self._agent.read(name, address, self._address + slot.offset, length)
        except NixlError:
            self._ring.release(slot)
            raise
        return Landed(slot, length, reading)

    def free(self, landed: Landed) -> None:
        """Its read is over, and nobody looks at the frame any more."""
        landed.reading.release()
        self._ring.release(landed.slot)

    def remove(self, name: str, under_way: Iterable[Landed]) -> None:
        """Stop to read from a peer, once what is under way is over."""
        self._ending[name] = list(under_way)
        self.reap()

    def reap(self) -> None:
        """Finish with peers that were removed and whose reads are over."""
        for name, reads in list(self._ending.items()):
            over = [landed for landed in reads if landed.reading.over()]
            for landed in over:
                reads.remove(landed)
                self.free(landed)
            if not reads:
                del self._ending[name]
                self._agent.remove(name)

    def close(self) -> None:
        """Let go of peers even if they never answered: the memory is about to be unreachable."""
        for name, reads in self._ending.items():
            self._agent.remove(name)
            for landed in reads:
                self.free(landed)
        self._ending.clear()
        self._ring.check_conserved(0)
