"""Memory for a staging ring that other processes on the same host can read.

The owner makes a memfd that is sealed against shrinking, so that no reader can be killed by a peer
that truncates it. The first page holds a magic word and a random number, by which a reader verifies
that it opened the ring that was announced, and not something else under the same numbers.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
from dataclasses import dataclass

from ..memfd import MemfdError, open_memfd

_NAME = "tandem-staging"
_MAGIC = b"TDMRING1"
_FIRST = struct.Struct("<8sQ")
MAX_RING_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class RingPlace:
    """How to find a ring: its owner, the owner's descriptor, its size and its number."""

    pid: int
    descriptor: int
    bytes: int
    nonce: int


class SharedRing:
    """The owner's side: ``memory`` has the requested size, and is writable."""

    def __init__(self, size: int) -> None:
        """Raises ``OSError``."""
        self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        total = mmap.PAGESIZE + size
        os.ftruncate(self._descriptor, total)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
        mapped = mmap.mmap(self._descriptor, total)
        nonce = secrets.randbits(64)
        _FIRST.pack_into(mapped, 0, _MAGIC, nonce)
        self.memory = memoryview(mapped)[mmap.PAGESIZE :]
        self.place = RingPlace(os.getpid(), self._descriptor, size, nonce)

    def close(self) -> None:
        """Let no other process map it; the memory goes with its last view."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class MappedRing:
    """A reader's side."""

    def __init__(self, place: RingPlace) -> None:
        """Map it. Raises ``MemfdError``."""
        if not 0 < place.bytes <= MAX_RING_BYTES:
            raise MemfdError(f"a ring of {place.bytes} bytes")
        total = mmap.PAGESIZE + place.bytes
        descriptor = open_memfd(place.pid, place.descriptor, _NAME)
        what = f"descriptor {place.descriptor} of process {place.pid}"
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(descriptor).st_size != total:
                raise MemfdError(f"{what} is not sealed, or not of {total} bytes")
            mapped = mmap.mmap(descriptor, total, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise MemfdError(f"cannot map {what}: {error}") from None
        finally:
            os.close(descriptor)
        if _FIRST.unpack_from(mapped) != (_MAGIC, place.nonce):
            raise MemfdError(f"{what} is the ring of another process")
        self._memory = memoryview(mapped)[mmap.PAGESIZE :]

    def slice(self, offset: int, length: int) -> memoryview:
        """Raises ``MemfdError`` for a range outside the ring."""
        if offset + length > len(self._memory):
            raise MemfdError(
                f"bytes {offset} to {offset + length} of a ring of {len(self._memory)}"
            )
        return self._memory[offset : offset + length]
