"""Memory for a staging ring that other processes on the same host can read.

The owner makes a memfd: it has no name that could be left behind, goes away with its last user
however that one ends, and is sealed against shrinking, so that no reader can be killed by a peer
that cuts it. A reader opens it through the owner's ``/proc`` entry, which needs the same user and
the same view of processes; where that is not so, the two ranks use TCP.

The first page holds a magic word and a random number, by which a reader knows that it has opened
what it was told of, and not what another process has under the same numbers.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
from dataclasses import dataclass

from ....errors import TransferError

_NAME = "tandem-staging"
_MAGIC = b"TDMRING1"
_FIRST = struct.Struct("<8sQ")
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
MAX_RING_BYTES = 1 << 40


class RingError(TransferError):
    """Another process's ring cannot be mapped."""


@dataclass(frozen=True, slots=True)
class RingPlace:
    """Where a ring is: its owner, the owner's descriptor, its size and its number."""

    pid: int
    descriptor: int
    bytes: int
    nonce: int


NO_RING = RingPlace(0, 0, 0, 0)


def host_identity() -> str:
    """Equal in two processes that see each other in ``/proc``; empty where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"
    except OSError:
        return ""


def can_share() -> bool:
    """Whether this system has sealed memfds and ``/proc``."""
    sealing = hasattr(os, "memfd_create") and all(hasattr(fcntl, name) for name in _SEALS)
    return sealing and bool(host_identity())


def open_memfd(pid: int, descriptor: int, name: str) -> int:
    """Open another process's memfd of this name to read. Raises ``RingError`` for what is none."""
    # Built from numbers, so that a peer cannot name any other file.
    path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
    try:
        # Looked at before it is opened: opening some devices has effects.
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            raise RingError(f"{path} is no {name}")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RingError(f"cannot open {path}: {error}") from None


class SharedRing:
    """The owner's side: ``memory`` is as large as was asked for, and writable."""

    def __init__(self, size: int) -> None:
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
        """Nobody can map it any more; the memory goes with its last view."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class MappedRing:
    """A reader's side."""

    def __init__(self, place: RingPlace) -> None:
        """Map it. Raises ``RingError``."""
        if not 0 < place.bytes <= MAX_RING_BYTES:
            raise RingError(f"a ring of {place.bytes} bytes")
        total = mmap.PAGESIZE + place.bytes
        descriptor = open_memfd(place.pid, place.descriptor, _NAME)
        what = f"descriptor {place.descriptor} of process {place.pid}"
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(descriptor).st_size != total:
                raise RingError(f"{what} is not sealed, or not of {total} bytes")
            mapped = mmap.mmap(descriptor, total, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise RingError(f"cannot map {what}: {error}") from None
        finally:
            os.close(descriptor)
        if _FIRST.unpack_from(mapped) != (_MAGIC, place.nonce):
            raise RingError(f"{what} is the ring of another process")
        self._memory = memoryview(mapped)[mmap.PAGESIZE :]

    def slice(self, offset: int, length: int) -> memoryview:
        """Raises ``RingError`` for what is not within the ring."""
        if offset + length > len(self._memory):
            raise RingError(f"bytes {offset} to {offset + length} of a ring of {len(self._memory)}")
        return self._memory[offset : offset + length]
