"""How frames come in over one connection: one class for each carrier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from ...errors import TransferError
from ..wire.frame import Message
from ..wire.greeting import Greeting
from .cuda_ipc.device_ring import DeviceLanding
from .doorbells import HeardDoorbells, read_doorbell, read_payload_doorbell
from .nixl.agent import NixlError, NixlPlace
from .nixl.landing import Landed, Landing
from .shared_memory.ring import MappedRing, RingError
from .zeromq.sockets import Socket

# What an inlet takes off its socket before it has given it out.
MAX_TOLD = 16
# A read of one frame. Silence on the control socket is noticed sooner.
READ_SECONDS = 5.0


class Inlet(Protocol):
    """Errors are ``TransferError``: the connection is of no use any more."""

    def descriptors(self) -> list[Any]:
        """What becomes readable when ``next`` may have something."""

    @property
    def needs_polling(self) -> bool:
        """Whether something may come of which no descriptor tells."""

    def next(self, now: float) -> Message | None:
        """The next frame, if it is here; valid until ``done``."""

    def done(self) -> None:
        """Nobody looks at the frame any more that ``next`` gave last."""

    def close(self) -> None: ...


class TcpInlet:
    """Frames are read where ZeroMQ put them: its buffer already holds just this frame, and copying
    it to a slot of ours would cost as much as the scatter."""

    needs_polling = False

    def __init__(self, bulk: Socket) -> None:
        self._bulk = bulk
        self._frame: zmq.Frame | None = None

    def descriptors(self) -> list[Any]:
        return [self._bulk]

    def next(self, now: float) -> memoryview | None:
        try:
            self._frame = self._bulk.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return memoryview(self._frame.buffer)

    def done(self) -> None:
        self._frame = None

    def close(self) -> None:
        pass


class RingInlet:
    """Frames are read in the peer's ring, which is mapped here."""

    needs_polling = False

    def __init__(self, theirs: Greeting, max_frame_bytes: int) -> None:
        """Raises ``RingError``."""
        self._limit = max_frame_bytes
        self._ring = MappedRing(theirs.ring)
        self._bells = HeardDoorbells(theirs.ring_pid, theirs.bell_descriptor, theirs.connection)
        self._lent = False

    def descriptors(self) -> list[Any]:
        return [self._bells.fileno()]

    def next(self, now: float) -> memoryview | None:
        record = self._bells.next()
        if record is None:
            return None
        place = read_doorbell(record)
        length = len(record) if place is None else place[1]
        _check_length(length, self._limit)
        if place is None:
            return memoryview(record)
        frame = self._ring.slice(*place)
        self._lent = True
        return frame

    def done(self) -> None:
        if self._lent:
            self._lent = False
            self._bells.give_back()

    def close(self) -> None:
        self._bells.close()


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise RingError(f"a frame of {length} bytes; the limit is {limit}")


class DeviceInlet:
    """Frames are copied out of the ring in the memory of the peer's device."""

    needs_polling = False

    def __init__(self, theirs: Greeting, landing: DeviceLanding, max_frame_bytes: int) -> None:
        """Raises ``DeviceError`` or ``RingError``. ``max_frame_bytes`` are those of the host."""
        self._limit = max_frame_bytes
        self._landing = landing
        self._bells = HeardDoorbells(theirs.device_pid, theirs.device_bell, theirs.connection)
        try:
            self._ring = landing.open(theirs.device_place)
        except TransferError:
            self._bells.close()
            raise

    def descriptors(self) -> list[Any]:
        return [self._bells.fileno()]

    def next(self, now: float) -> Message | None:
        record = self._bells.next()
        if record is None:
            return None
        told = read_payload_doorbell(record)
        if told is None:
            _check_length(len(record), self._limit)
            return memoryview(record)
        frame = self._landing.take(self._ring, *told)
        self._bells.give_back()
        return frame

    def done(self) -> None:
        pass

    def close(self) -> None:
        self._bells.close()
        self._ring.close()


@dataclass(slots=True)
class _Told:
    """What one bulk message told of: a small frame itself, or the place of one in the ring."""

    frame: bytes = b""
    offset: int = 0
    length: int = 0
    landed: Landed | None = None
    since: float = 0.0


class NixlInlet:
    """Frames are read out of the peer's ring over the network, several at once, and given out in
    the order in which the peer told of them."""

    def __init__(
        self,
        bulk: Socket,
        landing: Landing,
        name: str,
        place: NixlPlace,
        give_back: Callable[[], None],
    ) -> None:
        """Raises ``NixlError``."""
        self._bulk = bulk
        self._landing = landing
        self._name = name
        self._place = place
        self._give_back = give_back
        self._told: deque[_Told] = deque()
        self._given: Landed | None = None
        landing.add(name, place)

    def descriptors(self) -> list[Any]:
        return [self._bulk] if len(self._told) < MAX_TOLD else []

    @property
    def needs_polling(self) -> bool:
        return len(self._told) > 0

    def next(self, now: float) -> memoryview | None:
        self._listen()
        self._read_ahead(now)
        if not self._told or not self._is_here(self._told[0], now):
            return None
        first = self._told.popleft()
        self._given = first.landed
        return memoryview(first.frame) if first.landed is None else first.landed.frame

    def _listen(self) -> None:
        while len(self._told) < MAX_TOLD:
            try:
                message = self._bulk.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            place = read_doorbell(message)
            self._told.append(_Told(frame=message) if place is None else self._placed(*place))

    def _placed(self, offset: int, length: int) -> _Told:
        if offset + length > self._place.bytes:
            end, size = offset + length, self._place.bytes
            raise NixlError(f"bytes {offset} to {end} of a ring of {size}")
        return _Told(offset=offset, length=length)

    def _read_ahead(self, now: float) -> None:
        for told in self._told:
            if told.frame or told.landed is not None:
                continue
            told.landed = self._landing.read(
                self._name, self._place.address + told.offset, told.length, self._held()
            )
            if told.landed is None:
                return
            told.since = now

    def _held(self) -> int:
        return sum(told.landed is not None for told in self._told)

    @staticmethod
    def _is_here(told: _Told, now: float) -> bool:
        if told.landed is None:
            return bool(told.frame)
        if told.landed.reading.landed():
            return True
        if now - told.since > READ_SECONDS:
            raise NixlError(f"a read of {told.length} bytes took over {READ_SECONDS:g} s")
        return False

    def done(self) -> None:
        if self._given is not None:
            given, self._given = self._given, None
            self._landing.free(given)
            self._give_back()

    def close(self) -> None:
        under_way = [told.landed for told in self._told if told.landed is not None]
        self._told.clear()
        if self._given is not None:
            under_way.append(self._given)
            self._given = None
        self._landing.remove(self._name, under_way)
