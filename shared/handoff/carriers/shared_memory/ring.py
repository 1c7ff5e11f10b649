"""Memory for a staging ring that other processes on the same host can read.

The owner's memfd is sealed against shrinking, since truncating it would kill its readers. The first
page has a magic word and a random number, with which a reader verifies that it opened the announced
ring and not another file with the same numbers.
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
    """The location of a ring: its owner, the owner's descriptor, the ring's size and random
    number."""

    pid: int
    descriptor: int
    bytes: int
    nonce: int


class SharedRing:
    """The owner's side: writable ``memory`` of the requested size."""

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
        """Close the memfd, so that no other process can map it. Memory is freed with its last
        view."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class MappedRing:
    """A reader's side of a ring."""

    def __init__(self, place: RingPlace) -> None:
        """Map the ring. Raises ``MemfdError``."""
        if not 0 < place.bytes <= MAX_RING_BYTES:
            raise MemfdError(f"a ring of {place.bytes} bytes")
        total = mmap.PAGESIZE + place.bytes
        descriptor = open_memfd(place.pid, place.descriptor, _NAME)
        what = f"descriptor {place.descriptor} of process {place.pid}"
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(descriptor).st_size != total:
                raise MemfdError(f"{what} is not sealed, or does not have {total} bytes")
            mapped = mmap.mmap(descriptor, total, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise MemfdError(f"cannot map {what}: {error}") from None
        finally:
            os.close(descriptor)
        if _FIRST.unpack_from(mapped) != (_MAGIC, place.nonce):
            raise MemfdError(f"{what} is the ring of another process")
        self._memory = memoryview(mapped)[mmap.PAGESIZE :]

    def slice(self, offset: int, length: int) -> memoryview:
        """A range of the ring. Raises ``MemfdError`` if it is outside."""
        if offset + length > len(self._memory):
            raise MemfdError(
                f"bytes {offset} to {offset + length} of a ring of {len(self._memory)}"
            )
        return self._memory[offset : offset + length]
