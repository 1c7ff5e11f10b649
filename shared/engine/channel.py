"""The connection between the head process and one rank: length-prefixed messages.

It is a socket pair, or a TCP connection from another host. Its end means that the other side is
gone: a rank then exits at once, and the head fails its sequences.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Any, Protocol

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


async def read_message(reader: asyncio.StreamReader) -> RankMessage:
    """The next message. Raises ``IncompleteReadError`` or ``OSError`` at the end, and
    ``ValueError``, as ``CodecError`` is, for an invalid one."""
    prefix = await reader.readexactly(PREFIX_BYTES)
    return CODEC.decode(await reader.readexactly(body_length(prefix)))


class Stream(Protocol):
    """A connected socket, or one with TLS."""

    def sendall(self, data: bytes, /) -> None: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def getsockname(self) -> Any: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class BlockingChannel:
    """The other end than the head's: one thread receives, any thread sends."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._sending = threading.Lock()

    def send(self, message: RankMessage) -> None:
        """Send a message. Once the head is gone, which ``receive`` shows, it is dropped."""
        data = framed(message)
        with self._sending, contextlib.suppress(OSError):
            self._stream.sendall(data)

    @property
    def local_address(self) -> str:
        """This host's address on the route to the other side."""
        return str(self._stream.getsockname()[0])

    def close(self) -> None:
        """Close the connection, from any thread."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)  # wakes the thread that receives
        self._stream.close()

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
                size = self._stream.recv_into(view[done:])
            except OSError:
                return None
            if not size:
                return None
            done += size
        return bytes(parts)
