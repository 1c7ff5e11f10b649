"""Faults between two ranks, over any carrier: a message may be lost, delayed, doubled, reordered,
damaged or truncated, and a connection may break. A seed reproduces the same faults.

Faults happen where a message is sent, for each direction and socket (a lane) by itself, so holding
one lane back reorders it against the others. Frames lie in their staging slots while they wait, and
are read there only when they leave, as a network card would do.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from tandem.shared.handoff.carriers.base import SendHandle
from tandem.shared.handoff.carriers.transport import (
    Endpoints,
    Lost,
    Notice,
    PeerGoneError,
    Transport,
)
from tandem.shared.handoff.carriers.zeromq.dialer import ZmqDialer
from tandem.shared.handoff.carriers.zeromq.listener import ZmqListener
from tandem.shared.handoff.wire.frame import DeviceFrame, Message
from tandem.shared.handoff.wire.greeting import PeerKey


class Fault(Enum):
    DROP = "drop"
    DELAY = "delay"  # this message and those behind it wait
    DUPLICATE = "duplicate"
    REORDER = "reorder"  # it leaves behind the next one, or a turn later
    FLIP = "flip"  # one bit
    TRUNCATE = "truncate"
    RESET = "reset"  # the connection breaks


class Schedule:
    """The faults of messages: those that were planned first, then by chance.

    ``rates`` are probabilities a message; ``bytes_a_second`` throttles each lane (0: not at all).
    """

    def __init__(
        self, seed: int = 0, rates: dict[Fault, float] | None = None, bytes_a_second: float = 0
    ) -> None:
        self.random = random.Random(seed)
        self.rates = rates or {}
        self.bytes_a_second = bytes_a_second
        self.delay_seconds = 0.3
        self.planned: deque[Fault | None] = deque()
        self.happened: Counter[Fault] = Counter()

    def next(self) -> Fault | None:
        fault = self.planned.popleft() if self.planned else self._drawn()
        if fault is not None:
            self.happened[fault] += 1
        return fault

    def _drawn(self) -> Fault | None:
        chance = self.random.random()
        for fault, rate in self.rates.items():
            if chance < rate:
                return fault
            chance -= rate
        return None

    def quiet(self) -> None:
        """Stop all faults."""
        self.rates, self.bytes_a_second = {}, 0
        self.planned.clear()


@dataclass(slots=True)
class Leaving:
    """A message that waits in a lane until it leaves."""

    message: Message
    offset: int | None
    inner: SendHandle | None = None
    over: bool = False

    @property
    def done(self) -> bool:
        return self.over or (self.inner is not None and self.inner.done)


@dataclass(slots=True)
class FaultyLane:
    waiting: deque[Leaving] = field(default_factory=deque)
    held: Leaving | None = None  # leaves behind the next one
    open_at: float = 0.0

    def let_go(self) -> None:
        if self.held is not None:
            self.waiting.append(self.held)
            self.held = None

    def empty(self) -> None:
        for leaving in (*self.waiting, *([self.held] if self.held else [])):
            leaving.over = True
        self.waiting.clear()
        self.held = None


def _copy_of(leaving: Leaving) -> Leaving:
    """A copy of a message; a frame in a device's memory is announced twice instead."""
    if isinstance(leaving.message, DeviceFrame):
        return Leaving(leaving.message, leaving.offset)
    return Leaving(memoryview(bytes(leaving.message)), None)


class _Faulty:
    """Base of both decorated ends. ``inner`` is the real one."""

    def __init__(self, inner: Any, schedule: Schedule, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._schedule = schedule
        self._clock = clock
        self._lanes: dict[tuple[PeerKey, str], FaultyLane] = {}

    def sockets(self) -> Iterable[Any]:
        return self._inner.sockets()

    def bulk_sockets(self) -> Iterable[Any]:
        return self._inner.bulk_sockets()

    @property
    def needs_polling(self) -> bool:
        return bool(self._inner.needs_polling)

    def is_live(self, peer: PeerKey) -> bool:
        return bool(self._inner.is_live(peer))

    def carrier(self, peer: PeerKey) -> str:
        return str(self._inner.carrier(peer))

    def live(self) -> Counter[str]:
        return self._inner.live()

    def send_control(self, peer: PeerKey, message: bytes) -> None:
        self._send(peer, "control", Leaving(memoryview(message), None))

    def receive_control(self, now: float) -> list[tuple[PeerKey, bytes]]:
        return self._inner.receive_control(now)

    @property
    def has_notices(self) -> bool:
        return bool(self._inner.has_notices)

    def notices(self, now: float) -> list[Notice]:
        for (peer, name), lane in list(self._lanes.items()):
            lane.let_go()
            self._flush(peer, name, lane)
        notices: list[Notice] = self._inner.notices(now)
        for notice in notices:
            if isinstance(notice, Lost):
                self._forget(notice.peer)
        return notices

    def close(self) -> None:
        self._inner.close()
        for lane in self._lanes.values():
            lane.empty()

    def _forget(self, peer: PeerKey) -> None:
        for key in [key for key in self._lanes if key[0] == peer]:
            self._lanes.pop(key).empty()

    def _send(self, peer: PeerKey, name: str, leaving: Leaving) -> None:
        """Raises PeerGoneError, as the real one does."""
        if not self._inner.is_live(peer):
            raise PeerGoneError(f"no live connection to {peer}")
        lane = self._lanes.setdefault((peer, name), FaultyLane())
        fault = self._schedule.next()
        if fault is Fault.RESET:
            reset(self._inner, peer)
            raise PeerGoneError(f"{peer}: connection reset")
        self._queue(lane, leaving, fault)
        self._flush(peer, name, lane)

    def _queue(self, lane: FaultyLane, leaving: Leaving, fault: Fault | None) -> None:
        if fault is Fault.DROP:
            leaving.over = True
            return
        if fault is Fault.REORDER and lane.held is None:
            lane.held = leaving
            return
        lane.waiting.append(leaving)
        if fault is Fault.DELAY:
            lane.open_at = self._clock() + self._schedule.delay_seconds
        elif fault in (Fault.FLIP, Fault.TRUNCATE):
            self._damage(leaving, fault)
        elif fault is Fault.DUPLICATE:
            lane.waiting.append(_copy_of(leaving))
        lane.let_go()

    def _damage(self, leaving: Leaving, fault: Fault) -> None:
        """Damage a copy of the frame, so that the slot itself is free at once; in a device's
        memory, damage the slot."""
        if isinstance(leaving.message, DeviceFrame):
            self._damage_payload(leaving, leaving.message, fault)
            return
        damaged = bytearray(leaving.message)
        at = self._schedule.random.randrange(len(damaged))
        if fault is Fault.FLIP:
            damaged[at] ^= 1 << self._schedule.random.randrange(8)
        else:
            del damaged[at:]
        leaving.message, leaving.offset = memoryview(bytes(damaged)), None

    def _damage_payload(self, leaving: Leaving, frame: DeviceFrame, fault: Fault) -> None:
        at = self._schedule.random.randrange(len(frame.payload))
        if fault is Fault.FLIP:
            frame.payload[at] ^= 1 << self._schedule.random.randrange(8)
        else:
            leaving.message = replace(frame, payload=frame.payload[:at])

    def _flush(self, peer: PeerKey, name: str, lane: FaultyLane) -> None:
        """Send the messages that are due."""
        while lane.waiting and lane.open_at <= self._clock():
            leaving = lane.waiting.popleft()
            if self._schedule.bytes_a_second:
                lane.open_at = self._clock() + len(leaving.message) / self._schedule.bytes_a_second
            try:
                self._leave(peer, name, leaving)
            except PeerGoneError:
                leaving.over = True
                lane.empty()

    def _leave(self, peer: PeerKey, name: str, leaving: Leaving) -> None:
        if name == "bulk":
            leaving.inner = self._inner.send_bulk(peer, leaving.message, leaving.offset)
        else:
            assert not isinstance(leaving.message, DeviceFrame)
            self._inner.send_control(peer, bytes(leaving.message))


class FaultyListener(_Faulty):
    """A sending end whose messages meet faults."""

    @property
    def unknown_connections(self) -> int:
        return int(self._inner.unknown_connections)

    @property
    def keys_refused(self) -> int:
        return int(self._inner.keys_refused)

    def start(self) -> Endpoints:
        return self._inner.start()

    def admit(self, keys: Iterable[str]) -> None:
        self._inner.admit(keys)

    @property
    def is_greeting(self) -> bool:
        return bool(self._inner.is_greeting)

    def loan_sockets(self) -> Iterable[Any]:
        return self._inner.loan_sockets()

    def reply_sockets(self) -> Iterable[Any]:
        return self._inner.reply_sockets()

    def receive_replies(self, now: float) -> list[tuple[PeerKey, bytes]]:
        return self._inner.receive_replies(now)

    def slots_for(self, peer: PeerKey) -> int:
        return int(self._inner.slots_for(peer))

    def max_payload(self, peer: PeerKey) -> int:
        return int(self._inner.max_payload(peer))

    def kv_scales(self, peer: PeerKey) -> tuple[float, ...]:
        return tuple(self._inner.kv_scales(peer))

    def send_bulk(self, peer: PeerKey, message: Message, offset: int | None = None) -> SendHandle:
        leaving = Leaving(message, offset)
        self._send(peer, "bulk", leaving)
        return leaving


class FaultyDialer(_Faulty):
    """A receiving end whose messages meet faults."""

    def connect(self, peer: PeerKey, endpoints: Endpoints, now: float) -> None:
        self._inner.connect(peer, endpoints, now)

    def receive_bulk(self, now: float) -> tuple[PeerKey, memoryview] | None:
        return self._inner.receive_bulk(now)


def faulty(inner: Transport, schedule: Schedule, clock: Callable[[], float]) -> Transport:
    """The same transport with faults in both directions."""
    return Transport(
        lambda *args, **of: FaultyListener(inner.listener(*args, **of), schedule, clock),  # type: ignore[arg-type]
        lambda *args, **of: FaultyDialer(inner.dialer(*args, **of), schedule, clock),
    )


def reset(end: Any, peer: PeerKey) -> None:
    """Break a connection as one end sees it, which the ends have no public method for."""
    if isinstance(end, ZmqListener):
        end._lose(end._by_peer[peer], "connection reset")
    elif isinstance(end, ZmqDialer):
        end._lose(end._dials[peer], "connection reset")
    else:
        end.lose(peer, "connection reset")
