"""The carrier over the bulk socket: each message is a frame."""

from __future__ import annotations

from typing import Any

import zmq

from ....process.freed_memory import keep_freed_memory
from ...wire.frame import DeviceFrame, Message
from ..base import (
    MAX_SLOTS,
    Carrier,
    FrameReader,
    FrameWriter,
    Loans,
    ReceiveChannel,
    SendChannel,
    SendHandle,
)
from . import NAME


class TcpCarrier(Carrier):
    name = NAME
    baseline = True

    @classmethod
    def prepare(cls) -> None:
        # ZeroMQ allocates memory for each message; without this, half of its pages fault in anew.
        keep_freed_memory()

    def writer(self, channel: SendChannel, hello: bytes) -> FrameWriter:
        return TcpWriter(channel)

    def reader(self, channel: ReceiveChannel, offer: bytes) -> FrameReader:
        return TcpReader(channel.socket)


class TcpWriter:
    """Sends each frame out of its slot."""

    slots = MAX_SLOTS
    offer = b""
    needs_polling = False

    def __init__(self, channel: SendChannel) -> None:
        self._socket = channel.socket
        self._identity = channel.identity
        self.loans = Loans()

    def start(self) -> None:
        pass

    def descriptors(self) -> list[int]:
        return []

    def write(self, message: Message, offset: int | None) -> SendHandle:
        assert not isinstance(message, DeviceFrame)
        self._socket.send(self._identity, zmq.SNDMORE | zmq.NOBLOCK)
        tracker = self._socket.send(message, zmq.NOBLOCK, copy=False, track=True)
        assert tracker is not None
        return tracker

    def poll(self) -> None:
        pass

    def close(self) -> None:
        pass


class TcpReader:
    """Yields frames in ZeroMQ's own buffers: copying each to a slot would cost as much as the
    scatter."""

    needs_polling = False

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._frame: zmq.Frame | None = None

    def descriptors(self) -> list[Any]:
        return [self._socket]

    def read(self, now: float) -> memoryview | None:
        try:
            self._frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return memoryview(self._frame.buffer)

    def release(self) -> None:
        self._frame = None

    def close(self) -> None:
        pass
