"""The carrier over RDMA: the receiver reads frames out of the sender's ring over the network.

The bulk socket announces frames, and a ``release`` frame on the control socket gives one back. It
wakes the sender, which NIXL's notifications would not.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Any

import zmq

from ....errors import UsageError
from ...wire.frame import DeviceFrame, Message
from ...wire.greeting import PeerKey
from ..base import (
    MAX_LOANS,
    Carrier,
    FrameReader,
    FrameWriter,
    Loans,
    RankResources,
    ReceiveChannel,
    SendChannel,
    SendHandle,
)
from ..doorbells import doorbell, read_doorbell
from . import NAME, agent
from .agent import NixlAgent, NixlError, NixlPlace
from .buffers import FrameRead, ReceiveBuffers

# The limit of announced frames that are not yielded yet.
MAX_PENDING = 16
# The limit for one frame. Silence on the control socket is noticed sooner.
READ_SECONDS = 5.0
# The address and the bytes of the ring; its description follows.
_OFFER = struct.Struct("<QQ")


def agent_name(peer: PeerKey) -> str:
    """The name of a rank's agent."""
    return f"{peer.node_id}/{peer.rank}/{peer.epoch:016x}"


def encode_offer(place: NixlPlace) -> bytes:
    return _OFFER.pack(place.address, place.bytes) + place.description


def read_offer(offer: bytes) -> NixlPlace:
    """The place of the ring. Raises ``NixlError``."""
    if not _OFFER.size <= len(offer) <= _OFFER.size + agent.MAX_DESCRIPTION_BYTES:
        raise NixlError(f"an offer of {NAME} with {len(offer)} bytes")
    return NixlPlace(offer[_OFFER.size :], *_OFFER.unpack_from(offer))


class NixlCarrier(Carrier):
    # It opens ports of its choice and gives peers keys to memory, so --carrier must name it.
    name = NAME
    on_request = True
    retriable = True

    def __init__(self, rank: RankResources) -> None:
        """Raises ``StartupError``."""
        super().__init__(rank)
        self._agent = NixlAgent(agent_name(rank.me))
        self._buffers = ReceiveBuffers(self._agent, rank.max_frame_bytes)
        self._place = self._agent.register(rank.memory.memory).place if rank.sends else None

    @classmethod
    def check(cls, *, insecure: bool) -> None:
        if not insecure:
            raise UsageError(
                "--carrier nixl listens on ports and addresses that the library chooses, and is "
                "neither encrypted nor authenticated; add --insecure if the network is trusted"
            )
        agent.check_installed()

    @classmethod
    def prepare(cls) -> None:
        agent.load()

    def writer(self, channel: SendChannel, hello: bytes) -> FrameWriter:
        assert self._place is not None
        return NixlWriter(channel, self._agent, self._place)

    def reader(self, channel: ReceiveChannel, offer: bytes) -> FrameReader:
        return NixlReader(channel, self._buffers, read_offer(offer))

    def tick(self) -> None:
        self._buffers.reap()

    def close(self) -> None:
        self._buffers.close()
        self._agent.close()


class NixlWriter:
    """Announces frames in the ring, which the peer reads over the network."""

    slots = MAX_LOANS

    def __init__(self, channel: SendChannel, agent: NixlAgent, place: NixlPlace) -> None:
        self._socket = channel.socket
        self._identity = channel.identity
        self._agent = agent
        self.loans = Loans()
        self.offer = encode_offer(place)

    @property
    def needs_polling(self) -> bool:
        return len(self.loans) > 0

    def start(self) -> None:
        pass

    def descriptors(self) -> list[int]:
        return []

    def write(self, message: Message, offset: int | None) -> SendHandle:
        assert not isinstance(message, DeviceFrame)
        self._socket.send(self._identity, zmq.SNDMORE | zmq.NOBLOCK)
        if offset is None:
            tracker = self._socket.send(message, zmq.NOBLOCK, copy=False, track=True)
            assert tracker is not None
            return tracker
        self._socket.send(doorbell(offset, len(message)), zmq.NOBLOCK)
        return self.loans.lend()

    def poll(self) -> None:
        if self.loans:
            self._agent.progress()

    def close(self) -> None:
        self.loans.reclaim()


@dataclass(slots=True)
class _PendingFrame:
    """A small frame itself, or a frame's place in the peer's ring and the read of it."""

    frame: bytes = b""
    offset: int = 0
    length: int = 0
    read: FrameRead | None = None
    since: float = 0.0


class NixlReader:
    """Reads several frames at once, and yields them in the order of their announcements."""

    def __init__(self, channel: ReceiveChannel, buffers: ReceiveBuffers, place: NixlPlace) -> None:
        """Raises ``NixlError``."""
        self._socket = channel.socket
        self._give_back = channel.give_back
        self._buffers = buffers
        self._name = agent_name(channel.peer)
        self._place = place
        self._pending: deque[_PendingFrame] = deque()
        self._yielded: FrameRead | None = None
        buffers.add(self._name, place)

    def descriptors(self) -> list[Any]:
        return [self._socket] if len(self._pending) < MAX_PENDING else []

    @property
    def needs_polling(self) -> bool:
        return len(self._pending) > 0

    def read(self, now: float) -> memoryview | None:
        self._listen()
        self._read_ahead(now)
        if not self._pending or not self._is_here(self._pending[0], now):
            return None
        first = self._pending.popleft()
        self._yielded = first.read
        return memoryview(first.frame) if first.read is None else first.read.frame

    def _listen(self) -> None:
        while len(self._pending) < MAX_PENDING:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            place = read_doorbell(message)
            self._pending.append(
                _PendingFrame(frame=message) if place is None else self._frame_at(*place)
            )

    def _frame_at(self, offset: int, length: int) -> _PendingFrame:
        if offset + length > self._place.bytes:
            end, size = offset + length, self._place.bytes
            raise NixlError(f"bytes {offset} to {end} of a ring of {size}")
        return _PendingFrame(offset=offset, length=length)

    def _read_ahead(self, now: float) -> None:
        for pending in self._pending:
            if pending.frame or pending.read is not None:
                continue
            pending.read = self._buffers.read(
                self._name, self._place.address + pending.offset, pending.length, self._num_reads()
            )
            if pending.read is None:
                return
            pending.since = now

    def _num_reads(self) -> int:
        return sum(pending.read is not None for pending in self._pending)

    @staticmethod
    def _is_here(pending: _PendingFrame, now: float) -> bool:
        if pending.read is None:
            return bool(pending.frame)
        if pending.read.handle.finished():
            return True
        if now - pending.since > READ_SECONDS:
            raise NixlError(f"a read of {pending.length} bytes took over {READ_SECONDS:g} s")
        return False

    def release(self) -> None:
        if self._yielded is not None:
            read, self._yielded = self._yielded, None
            self._buffers.free(read)
            self._give_back()

    def close(self) -> None:
        under_way = [each.read for each in self._pending if each.read is not None]
        self._pending.clear()
        if self._yielded is not None:
            under_way.append(self._yielded)
            self._yielded = None
        self._buffers.remove(self._name, under_way)
