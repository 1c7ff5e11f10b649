"""Doorbells: pipes that announce frames in a ring between two processes of one host.

Each connection has two pipes. Into one the sender writes a record for every frame in the ring;
small frames (a fin) travel in the record itself, which keeps the order. Into the other the receiver
writes a byte for every frame that it has read. A pipe wakes its reader within microseconds, without
a thread in between, which over ZeroMQ cost more than the copies. It has no name that could be left
behind, and it ends with its last writer, so the death of a peer is noticed at once.

The owner of the ring creates both pipes, and the receiver opens its ends through ``/proc``, like
the ring. A pipe has no identity: a descriptor may be any other pipe of the same user. So the owner
records the connection's two pipes in a sealed memfd, and announces only the memfd.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct

from .memfd import MemfdError, open_memfd

# Writes up to this size are atomic: PIPE_BUF on Linux.
MAX_RECORD_BYTES = 4096
_READ_BYTES = 65536
_LENGTH = struct.Struct("<H")
_NAME = "tandem-doorbells"
# The content of the memfd: the connection, then descriptor and inode of each end of the receiver.
_CARD = struct.Struct("<8sQIQIQ")
_CARD_MAGIC = b"TDMBELLS"
_PLACE = struct.Struct("<4sQI")
_PLACE_MAGIC = b"TDMS"
_PAYLOAD_MAGIC = b"TDMD"


def doorbell(offset: int, length: int) -> bytes:
    """The record that announces a frame at this place of the ring."""
    return _PLACE.pack(_PLACE_MAGIC, offset, length)


def read_doorbell(record: bytes) -> tuple[int, int] | None:
    """Offset and length of a frame; ``None`` if the record is a frame itself."""
    if len(record) != _PLACE.size:
        return None
    magic, offset, length = _PLACE.unpack(record)
    return (offset, length) if magic == _PLACE_MAGIC else None


def payload_doorbell(offset: int, length: int, head: memoryview) -> bytes:
    """The record of a frame with this header, and its payload at this place of a device's ring."""
    return _PLACE.pack(_PAYLOAD_MAGIC, offset, length) + head


def read_payload_doorbell(record: bytes) -> tuple[int, int, bytes] | None:
    """Offset, length and header; ``None`` if the record is a frame itself."""
    if len(record) < _PLACE.size:
        return None
    magic, offset, length = _PLACE.unpack_from(record)
    return (offset, length, record[_PLACE.size :]) if magic == _PAYLOAD_MAGIC else None


class DoorbellWriter:
    """The sender's ends of one connection."""

    def __init__(self, connection: int) -> None:
        """Create the pipes. Raises ``OSError``."""
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
        """The memfd for the receiver, until it has opened its ends and ``opened`` is called."""
        return self._card

    def opened(self) -> None:
        """Close our copies of the receiver's ends, so that its death ends the pipes."""
        for descriptor in (*self._theirs, self._card):
            _close(descriptor)
        self._theirs = [-1, -1]
        self._card = -1

    def fileno(self) -> int:
        """The descriptor, readable when frames were given back or the receiver is gone."""
        return self._back

    def ring(self, record: bytes | memoryview) -> None:
        """Write a record. Raises ``OSError`` if the receiver is gone, or the pipe is full."""
        assert len(record) <= MAX_RECORD_BYTES - _LENGTH.size
        os.write(self._bell, _LENGTH.pack(len(record)) + record)

    def count_returns(self) -> int:
        """Count the frames that were given back since the last call. Raises ``EOFError`` when the
        receiver is gone."""
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


class DoorbellReader:
    """The receiver's ends of one connection."""

    def __init__(self, pid: int, descriptor: int, connection: int) -> None:
        """Open the sender's pipes. Raises ``MemfdError``."""
        self._unread = b""
        self._back = -1
        bell, back = _read_card(pid, descriptor, connection)
        self._bell = _open_pipe(pid, *bell, os.O_RDONLY)
        try:
            self._back = _open_pipe(pid, *back, os.O_WRONLY)
        except MemfdError:
            self.close()
            raise

    def fileno(self) -> int:
        """The descriptor, readable when a record has come or the sender is gone."""
        return self._bell

    def next(self) -> bytes | None:
        """The next record, ``None`` when there is none yet. Raises ``MemfdError`` when the sender
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
            raise MemfdError("the sender's process has ended, or closed the doorbell")
        self._unread += read
        return True

    def give_back(self) -> None:
        """Give the oldest frame back. A lost sender is left to ``next``."""
        with contextlib.suppress(OSError):
            os.write(self._back, b"r")

    def close(self) -> None:
        for descriptor in (self._bell, self._back):
            _close(descriptor)
        self._bell = self._back = -1


def _sealed(content: bytes) -> int:
    """A memfd with unchangeable content. Raises ``OSError``."""
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
    """Descriptor and inode of both pipes, as the owner recorded them. Raises ``MemfdError``."""
    memfd = open_memfd(pid, descriptor, _NAME)
    try:
        content = os.pread(memfd, _CARD.size + 1, 0)
    finally:
        os.close(memfd)
    if len(content) != _CARD.size:
        raise MemfdError(
            f"descriptor {descriptor} of process {pid} has {len(content)} bytes, which is not the "
            f"description of a pair of doorbells ({_CARD.size} bytes)"
        )
    magic, number, bell, bell_inode, back, back_inode = _CARD.unpack(content)
    if (magic, number) != (_CARD_MAGIC, connection):
        raise MemfdError(
            f"descriptor {descriptor} of process {pid} is not for the doorbells of connection "
            f"{connection}"
        )
    return (bell, bell_inode), (back, back_inode)


def _open_pipe(pid: int, descriptor: int, inode: int, mode: int) -> int:
    path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
    try:
        # Checked before opening it, since opening some devices has side effects.
        status = os.stat(path)
        if not stat.S_ISFIFO(status.st_mode) or status.st_ino != inode:
            raise MemfdError(f"{path} is not the announced pipe")
        return os.open(path, mode | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise MemfdError(f"cannot open {path}: {error}") from None


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
