"""How frames leave over one connection: one class for each carrier.

Where the peer reads them out of our ring, they are lent until it says, in the order in which it was
told of them, that it has read them.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

import zmq

from ...errors import TransferError
from ..wire.frame import DeviceFrame, Message
from ..wire.greeting import Greeting
from .base import MAX_SLOTS, Departure
from .doorbells import Doorbells, doorbell, payload_doorbell
from .nixl.agent import NixlAgent
from .zeromq.sockets import Socket

# Frames that a peer may have in our ring at once. With more, they have left the cache when it reads
# them: two Zen 3 cores move 10 GB/s with 4 to 6 frames of 1 MiB, and 6 GB/s with 32.
LENT_FRAMES = 6


@dataclass(slots=True)
class _Lent:
    """A frame that the peer reads in our ring."""

    done: bool = False


class Loans:
    """Frames in the ring that a peer has not given back yet, oldest first."""

    def __init__(self) -> None:
        self._lent: deque[_Lent] = deque()

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self) -> Departure:
        self._lent.append(_Lent())
        return self._lent[-1]

    def give_back(self, frames: int) -> None:
        """Raises ``TransferError`` when there are not so many."""
        if frames > len(self._lent):
            raise TransferError(f"it gave back {frames} frames of {len(self._lent)}")
        for _ in range(frames):
            self._lent.popleft().done = True

    def call_in(self) -> None:
        """Take back what a lost peer had borrowed. It may still be reading: then its checksums
        fail, and the transfer, which has failed here, can never be confirmed there."""
        self.give_back(len(self._lent))


class Outlet(Protocol):
    """``slots`` is how many slots of the ring frames for the peer may hold at once."""

    slots: int
    loans: Loans

    def welcome(self, answer: Greeting) -> Greeting:
        """The answer to a greeting, with what the peer needs to choose this."""

    def chosen(self) -> None:
        """The peer uses it from now on."""

    def descriptors(self) -> list[int]:
        """What becomes readable when ``poll`` has something to do."""

    @property
    def needs_polling(self) -> bool:
        """Whether ``poll`` may have something to do of which no descriptor tells."""

    def send(self, message: Message, offset: int | None) -> Departure:
        """Raises ``ZMQError`` or ``OSError`` when the connection is gone."""

    def poll(self) -> None:
        """Take back what was read. Raises ``EOFError``, ``OSError`` or ``TransferError``."""

    def close(self) -> None: ...


class TcpOutlet:
    """The frames themselves go over the bulk socket."""

    slots = MAX_SLOTS

    def __init__(self, bulk: Socket, bulk_id: bytes) -> None:
        self._bulk = bulk
        self._bulk_id = bulk_id
        self.loans = Loans()

    @property
    def needs_polling(self) -> bool:
        return False

    def welcome(self, answer: Greeting) -> Greeting:
        return answer

    def chosen(self) -> None:
        pass

    def descriptors(self) -> list[int]:
        return []

    def send(self, message: Message, offset: int | None) -> Departure:
        assert not isinstance(message, DeviceFrame)
        self._bulk.send(self._bulk_id, zmq.SNDMORE | zmq.NOBLOCK)
        tracker = self._bulk.send(message, zmq.NOBLOCK, copy=False, track=True)
        assert tracker is not None
        return tracker

    def poll(self) -> None:
        pass

    def close(self) -> None:
        pass


class RingOutlet:
    """The peer has mapped the ring, and pipes tell of frames."""

    slots = LENT_FRAMES
    needs_polling = False

    def __init__(self, connection: int) -> None:
        """Raises ``OSError``."""
        self._bells = Doorbells(connection)
        self.loans = Loans()

    def welcome(self, answer: Greeting) -> Greeting:
        return replace(answer, bell_descriptor=self._bells.descriptor)

    def chosen(self) -> None:
        self._bells.opened()

    def descriptors(self) -> list[int]:
        return [self._bells.fileno()]

    def send(self, message: Message, offset: int | None) -> Departure:
        assert not isinstance(message, DeviceFrame)
        if offset is None:
            self._bells.ring(message)
            return _Lent(done=True)
        self._bells.ring(doorbell(offset, len(message)))
        return self.loans.lend()

    def poll(self) -> None:
        self.loans.give_back(self._bells.given_back())

    def close(self) -> None:
        self._bells.close()
        self.loans.call_in()


class DeviceOutlet(RingOutlet):
    """The peer copies payloads out of the ring in our device's memory; pipes tell of them, and
    carry the headers."""

    def welcome(self, answer: Greeting) -> Greeting:
        return replace(answer, device_pid=os.getpid(), device_bell=self._bells.descriptor)

    def send(self, message: Message, offset: int | None) -> Departure:
        if not isinstance(message, DeviceFrame):
            return super().send(message, None)
        assert offset is not None
        self._bells.ring(payload_doorbell(offset, len(message.payload), message.head))
        return self.loans.lend()


class NixlOutlet(TcpOutlet):
    """The peer reads the ring over the network; the bulk socket tells it of frames, and it says on
    the control socket that it has read one, which wakes us as a notice of the library would not."""

    slots = LENT_FRAMES

    def __init__(self, bulk: Socket, bulk_id: bytes, agent: NixlAgent) -> None:
        super().__init__(bulk, bulk_id)
        self._agent = agent

    @property
    def needs_polling(self) -> bool:
        return len(self.loans) > 0

    def send(self, message: Message, offset: int | None) -> Departure:
        if offset is None:
            return super().send(message, offset)
        self._bulk.send(self._bulk_id, zmq.SNDMORE | zmq.NOBLOCK)
        self._bulk.send(doorbell(offset, len(message)), zmq.NOBLOCK)
        return self.loans.lend()

    def poll(self) -> None:
        if self.loans:
            self._agent.progress()

    def close(self) -> None:
        self.loans.call_in()
