"""How the head process and one rank talk: length-prefixed msgpack over a socket pair.

Messages are ``[kind, payload]``. Nothing is unpickled. A closed socket means the other side is
gone: a rank then exits at once, the head fails what the rank held.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import msgpack

MAX_MESSAGE_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")


def pack(kind: str, payload: Any) -> bytes:
    body: bytes = msgpack.packb([kind, payload])
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> tuple[str, Any]:
    kind, payload = msgpack.unpackb(body, strict_map_key=False)
    return kind, payload


def body_length(prefix: bytes) -> int:
    """Bytes that follow the prefix. Raises ``ValueError`` beyond the limit."""
    length = int(_LENGTH.unpack(prefix)[0])
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return length


PREFIX_BYTES = _LENGTH.size


class BlockingChannel:
    """The rank's end: one thread receives, any thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def send(self, kind: str, payload: Any) -> None:
        data = pack(kind, payload)
        with self._sending:
            self._socket.sendall(data)

    def receive(self) -> tuple[str, Any] | None:
        """The next message, or ``None`` when the head is gone."""
        prefix = self._read(PREFIX_BYTES)
        if prefix is None:
            return None
        body = self._read(body_length(prefix))
        return None if body is None else unpack(body)

    def _read(self, count: int) -> bytes | None:
        parts = bytearray(count)
        view, done = memoryview(parts), 0
        while done < count:
            try:
                got = self._socket.recv_into(view[done:])
            except OSError:
                return None
            if not got:
                return None
            done += got
        return bytes(parts)
