"""Throughput of KV by a carrier whose receiver reads the sender's ring, against a memcpy.

Three variants take turns: a memcpy of the cold source in one process, the carrier alone (copied
into the sender's ring, and out of where it arrives by the receiver), and whole transfers (pack,
checksum, carrier, verify, scatter).

Sender and receiver have a core each, as two nodes of one host do. Left to itself, the scheduler
wakes the receiver on the sender's core, where the two take turns instead of working side by side.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from tandem.benchmarks.support.cores import two_cores
from tandem.benchmarks.support.handoff_pair import (
    MIB,
    WINDOW,
    Variant,
    control_overhead,
    greeting,
    row,
    take_turns,
    whole_transfers,
)
from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.shared.handoff.carriers.base import SendHandle
from tandem.shared.handoff.carriers.device import DEVICE_SLOT_BYTES, DEVICE_SLOTS, Device
from tandem.shared.handoff.carriers.kinds import CARRIERS
from tandem.shared.handoff.carriers.ranks import (
    CarrierSettings,
    RankCarriers,
    open_carriers,
)
from tandem.shared.handoff.carriers.staging import RingSlot
from tandem.shared.handoff.carriers.transport import Endpoints, TransportEnd
from tandem.shared.handoff.carriers.zeromq.dialer import ZmqDialer
from tandem.shared.handoff.carriers.zeromq.listener import ZmqListener
from tandem.shared.handoff.carriers.zeromq.sockets import Timing
from tandem.shared.handoff.wire.frame import HEADER_BYTES
from tandem.shared.handoff.wire.greeting import PeerKey

AGAINST = "memcpy, same cold source, same run"
TIMING = Timing(silence_seconds=60.0)
FRAME = HEADER_BYTES + MIB


# ---- a memcpy ----------------------------------------------------------------------------------


def idle_sender(pipe: Connection, size: int, rounds: int) -> None:
    pipe.send(None)
    for _ in range(rounds + 1):
        pipe.recv()


def copier(pipe: Connection, size: int, rounds: int) -> None:
    pipe.recv()
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    pipe.send(None)
    for _ in range(rounds):
        pipe.recv()
        np.copyto(target, source)
        pipe.send(None)


class Memcpy(Variant):
    """One process copies; the other one only lets the benchmark speak to both alike."""

    def move(self) -> float:
        self.receiving.send(None)
        return super().move()


# ---- the carrier alone -------------------------------------------------------------------------


SENDER, RECEIVER = (
    PeerKey(node_id=name, epoch=epoch, rank=0) for name, epoch in (("p", 1), ("d", 2))
)


def carriers_of(
    me: PeerKey, carrier: str, *, sends: bool, device: Device | None = None
) -> RankCarriers:
    settings = CarrierSettings(
        carrier=carrier,
        sends=sends,
        slots=2 * WINDOW // MIB if sends else 2,
        slot_bytes=MIB,
        device_slots=DEVICE_SLOTS,
        device_slot_bytes=DEVICE_SLOT_BYTES,
    )
    return open_carriers(CARRIERS, settings, me, device)


def _await(end: TransportEnd, poller: zmq.Poller) -> None:
    """Wait until there may be work, only briefly if the carrier must be polled."""
    poller.poll(1 if end.needs_polling else 1000)


def _register(end: TransportEnd, poller: zmq.Poller) -> None:
    for each in end.sockets():
        poller.register(each, zmq.POLLIN)


class SendingEnd:
    """A sending end with one peer, and the frames in flight to it."""

    def __init__(self, carrier: str, device: Device | None = None) -> None:
        self._carriers = carriers_of(SENDER, carrier, sends=True, device=device)
        self._ring = self._carriers.ring_of(carrier)
        self._peer = RECEIVER
        self._in_flight: deque[tuple[RingSlot, SendHandle]] = deque()
        self._poller = zmq.Poller()
        self._context: zmq.Context[Any] = zmq.Context()
        self._listener = ZmqListener(
            self._context,
            greeting(SENDER, self._carriers.hellos()),
            self._carriers,
            host="127.0.0.1",
            port=0,
            timing=TIMING,
        )

    def start(self) -> Endpoints:
        return self._listener.start()

    def meet(self) -> None:
        """Wait until the peer has joined."""
        while not self._listener.is_live(self._peer):
            self._listener.receive_control(time.monotonic())
        # Every loop must read them; unread bytes would wake it again.
        self._listener.notices(time.monotonic())
        _register(self._listener, self._poller)

    def slot(self) -> Any:
        """A free slot of the ring."""
        self.lend_at_most(self._listener.slots_for(self._peer) - 1)
        slot = self._ring.acquire()
        assert slot is not None
        return slot

    def lend(self, slot: RingSlot) -> None:
        message = slot.message(self._ring.payload_bytes)
        self._in_flight.append((slot, self._listener.send_bulk(self._peer, message, slot.offset)))

    def lend_at_most(self, frames: int) -> None:
        """Wait until at most ``frames`` are in flight."""
        while len(self._in_flight) > frames:
            _await(self._listener, self._poller)
            self._listener.receive_control(time.monotonic())
            while self._in_flight and self._in_flight[0][1].done:
                self._ring.release(self._in_flight.popleft()[0])

    def close(self) -> None:
        self._listener.close()
        self._context.destroy(linger=0)
        self._carriers.close()


class ReceivingEnd:
    """A receiving end that has joined its one peer."""

    def __init__(self, carrier: str, endpoints: Endpoints, device: Device | None = None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._carriers = carriers_of(RECEIVER, carrier, sends=False, device=device)
        me = greeting(RECEIVER, self._carriers.hellos())
        self._dialer = ZmqDialer(
            self._context, me, self._carriers, max_frame_bytes=FRAME, timing=TIMING
        )
        self._dialer.connect(SENDER, endpoints, time.monotonic())
        while not self._dialer.is_live(SENDER):
            self._dialer.receive_control(time.monotonic())
        self._poller = zmq.Poller()
        _register(self._dialer, self._poller)

    def messages(self) -> Iterator[Any]:
        while True:
            _await(self._dialer, self._poller)
            while frames := self._dialer.receive_bulk(time.monotonic()):
                yield frames[1]

    def close(self) -> None:
        self._dialer.close()
        self._context.destroy(linger=0)
        self._carriers.close()


def ring_sender(pipe: Connection, size: int, rounds: int, carrier: str) -> None:
    source = np.ones(size, np.uint8).data
    sending = SendingEnd(carrier)
    pipe.send(sending.start())
    sending.meet()
    for _ in range(rounds):
        pipe.recv()
        for at in range(0, size, MIB):
            slot = sending.slot()
            slot.payload[:] = source[at : at + MIB]
            sending.lend(slot)
        sending.lend_at_most(0)
    pipe.recv()
    sending.close()


def ring_receiver(pipe: Connection, size: int, rounds: int, carrier: str) -> None:
    endpoints: Endpoints = pipe.recv()
    target = np.ones(size, np.uint8).data
    receiving = ReceivingEnd(carrier, endpoints)
    messages = receiving.messages()
    pipe.send(None)
    for _ in range(rounds):
        for at in range(0, size, MIB):
            target[at : at + MIB] = next(messages)[-MIB:]
        pipe.send(None)
    receiving.close()


# ---- the run -----------------------------------------------------------------------------------


def compare(name: str, carrier: str, goal: str) -> None:
    """The benchmark of this name; ``goal`` is that of the carrier alone."""
    parser = benchmark_parser(__doc__, rounds=11)
    parser.add_argument("--mib", type=int, default=256)
    options = parser.parse_args()
    size = options.mib * MIB
    cores = two_cores()
    alone = partial(ring_sender, carrier=carrier), partial(ring_receiver, carrier=carrier)
    variants = {
        "memcpy": Memcpy(idle_sender, copier, size, options.rounds, cores),
        "carrier": Variant(*alone, size, options.rounds, cores),
        "full": Variant(*whole_transfers(carrier), size, options.rounds, cores),
    }
    rates = take_turns(variants, options.rounds)
    memcpy = rates["memcpy"]
    rows = [
        {"metric": "memcpy", "value": statistics.median(memcpy), "unit": "GB/s"},
        row("carrier alone: into the ring and out of it", rates["carrier"], memcpy, goal, AGAINST),
        row("pack + carrier + scatter", rates["full"], memcpy, "", AGAINST),
        {
            "metric": "control overhead of a transfer, median",
            "value": control_overhead(carrier),
            "unit": "ms",
            "goal": "<=3",
        },
    ]
    publish(name, rows, dry=options.dry)
