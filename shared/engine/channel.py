"""The socket pair between the head process and one rank: length-prefixed messages.

A closed socket means that the other side is gone: a rank then exits at once, and the head fails its
sequences.
"""

from __future__ import annotations

import socket
import struct
import threading

from .messages import CODEC, MAX_MESSAGE_BYTES, RankMessage

_LENGTH = struct.Struct("<I")
PREFIX_BYTES = _LENGTH.size


def framed(message: RankMessage) -> bytes:
    """The encoded message, after its length."""
    body = CODEC.encode(message)
    return _LENGTH.pack(len(body)) + body


def body_length(prefix: bytes) -> int:
    """The number of bytes that follow the prefix. Raises ``ValueError`` beyond the limit."""
    length = int(_LENGTH.unpack(prefix)[0])
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return length


class BlockingChannel:
    """The rank's end: one thread receives, any thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def send(self, message: RankMessage) -> None:
        data = framed(message)
        with self._sending:
            self._socket.sendall(data)

    def receive(self) -> RankMessage | None:
        """The next message, or ``None`` when the head is gone. Raises ``CodecError``."""
        prefix = self._read(PREFIX_BYTES)
        if prefix is None:
            return None
        body = self._read(body_length(prefix))
        return None if body is None else CODEC.decode(body)

    def _read(self, count: int) -> bytes | None:
        parts = bytearray(count)
        view, done = memoryview(parts), 0
        while done < count:
            try:
                size = self._socket.recv_into(view[done:])
            except OSError:
                return None
            if not size:
                return None
            done += size
        return bytes(parts)
