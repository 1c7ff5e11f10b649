"""How the two ends of a shared-memory connection tell each other of frames in the ring.

Two pipes for each connection. In one the sender writes a record for every frame that it has laid
into the ring; small frames (a fin) travel in the record itself, so that nothing can overtake
anything. In the other the receiver writes a byte for every frame that it has read. A pipe wakes its
reader within microseconds and without a thread in between, which over ZeroMQ cost more than the
copies; it has no name that could be left behind, and it ends when its last writer does, so the
death of a peer is known at once.

The owner of the ring makes both pipes, and the receiver opens its ends through ``/proc``, as it
does with the ring. A pipe says of itself neither whose it is nor what for, and may be any other
program's of the same user; so their owner writes down, in a sealed memfd like the ring's, which two
pipes are those of this connection. The receiver is told of the memfd alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct

from .shared_memory.ring import RingError, open_memfd

# What a pipe takes in one piece, whatever else is written to it (POSIX's least PIPE_BUF is 512,
# Linux has 4096).
MAX_RECORD_BYTES = 4096
_READ_BYTES = 65536
_LENGTH = struct.Struct("<H")
_NAME = "tandem-doorbells"
# Of the memfd: the connection, then descriptor and inode of the receiver's ends.
_CARD = struct.Struct("<8sQIQIQ")
_CARD_MAGIC = b"TDMBELLS"
_PLACE = struct.Struct("<4sQI")
_PLACE_MAGIC = b"TDMS"
_PAYLOAD_MAGIC = b"TDMD"


def doorbell(offset: int, length: int) -> bytes:
    """Says that a frame lies in the ring, and where."""
    return _PLACE.pack(_PLACE_MAGIC, offset, length)


def read_doorbell(record: bytes) -> tuple[int, int] | None:
    """Offset and length; ``None`` for a record that is a frame itself."""
    if len(record) != _PLACE.size:
        return None
    magic, offset, length = _PLACE.unpack(record)
    return (offset, length) if magic == _PLACE_MAGIC else None


def payload_doorbell(offset: int, length: int, head: memoryview) -> bytes:
    """Says that the payload of a frame with this header lies in a device's ring, and where."""
    return _PLACE.pack(_PAYLOAD_MAGIC, offset, length) + head


def read_payload_doorbell(record: bytes) -> tuple[int, int, bytes] | None:
    """Offset, length and header; ``None`` for a record that is a frame itself."""
    if len(record) < _PLACE.size:
        return None
    magic, offset, length = _PLACE.unpack_from(record)
    return (offset, length, record[_PLACE.size :]) if magic == _PAYLOAD_MAGIC else None


class Doorbells:
    """The sender's ends of one connection."""

    def __init__(self, connection: int) -> None:
        """Make the pipes. Raises ``OSError``."""
        self._theirs = [-1, -1]
        self._bell = self._back = self._card = -1
        try:
            self._theirs[0], self._bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._back, self._theirs[1] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            ends = [part for end in self._theirs for part in (end, os.fstat(end).st_ino)]
            self._card = _sealed(_CARD.pack(_CARD_MAGIC, connection, *ends))
        except OSError:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """What the receiver opens first; until it has its ends, ``opened`` must not be called."""
        return self._card

    def opened(self) -> None:
        """The receiver has its ends. Ours of them go, so that its death ends the pipes."""
        for descriptor in (*self._theirs, self._card):
            _close(descriptor)
        self._theirs = [-1, -1]
        self._card = -1

    def fileno(self) -> int:
        """Readable when the receiver has given frames back, or is gone."""
        return self._back

    def ring(self, record: bytes | memoryview) -> None:
        """Say that a frame is there. Raises ``OSError`` when the receiver is gone or, with tens of
        kilobytes unread, might as well be."""
        assert len(record) <= MAX_RECORD_BYTES - _LENGTH.size
        os.write(self._bell, _LENGTH.pack(len(record)) + record)

    def given_back(self) -> int:
        """Frames that the receiver has read since the last call. Raises ``EOFError`` when it is
        gone."""
        try:
            read = os.read(self._back, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not read:
            raise EOFError("its process has ended, or closed the pipe")
        return len(read)

    def close(self) -> None:
        self.opened()
        for descriptor in (self._bell, self._back):
            _close(descriptor)
        self._bell = self._back = -1


class HeardDoorbells:
    """The receiver's ends of one connection."""

    def __init__(self, pid: int, descriptor: int, connection: int) -> None:
        """Open what the sender has made. Raises ``RingError``."""
        self._unread = b""
        self._back = -1
        bell, back = _read_card(pid, descriptor, connection)
        self._bell = _open_pipe(pid, *bell, os.O_RDONLY)
        try:
            self._back = _open_pipe(pid, *back, os.O_WRONLY)
        except RingError:
            self.close()
            raise

    def fileno(self) -> int:
        """Readable when a frame has come, or the sender is gone."""
        return self._bell

    def next(self) -> bytes | None:
        """The next record, ``None`` when there is none yet. Raises ``RingError`` when the sender
        is gone."""
        record = self._take()
        if record is None and self._read():
            record = self._take()
        return record

    def _take(self) -> bytes | None:
        if len(self._unread) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._unread)
        end = _LENGTH.size + length
        if len(self._unread) < end:
            return None
        record, self._unread = self._unread[_LENGTH.size : end], self._unread[end:]
        return record

    def _read(self) -> bool:
        try:
            read = os.read(self._bell, _READ_BYTES)
        except BlockingIOError:
            return False
        if not read:
            raise RingError("the sender's process has ended, or closed the doorbell")
        self._unread += read
        return True

    def give_back(self) -> None:
        """One more frame was read. A sender that is gone is noticed by ``next``."""
        with contextlib.suppress(OSError):
            os.write(self._back, b"r")

    def close(self) -> None:
        for descriptor in (self._bell, self._back):
            _close(descriptor)
        self._bell = self._back = -1


def _sealed(content: bytes) -> int:
    """A memfd that nobody can change. Raises ``OSError``."""
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, content)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _read_card(
    pid: int, descriptor: int, connection: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Descriptor and inode of either pipe, by the word of their owner. Raises ``RingError``."""
    opened = open_memfd(pid, descriptor, _NAME)
    try:
        content = os.pread(opened, _CARD.size + 1, 0)
    finally:
        os.close(opened)
    if len(content) != _CARD.size:
        raise RingError(f"descriptor {descriptor} of process {pid} names no doorbells")
    magic, number, bell, bell_inode, back, back_inode = _CARD.unpack(content)
    if (magic, number) != (_CARD_MAGIC, connection):
        raise RingError(f"the doorbells of process {pid} are another connection's")
    return (bell, bell_inode), (back, back_inode)


def _open_pipe(pid: int, descriptor: int, inode: int, mode: int) -> int:
    path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
    try:
        # Looked at before it is opened: opening some devices has effects.
        found = os.stat(path)
        if not stat.S_ISFIFO(found.st_mode) or found.st_ino != inode:
            raise RingError(f"{path} is not the pipe that it was")
        return os.open(path, mode | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RingError(f"cannot open {path}: {error}") from None


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
