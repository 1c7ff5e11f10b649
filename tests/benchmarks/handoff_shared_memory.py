"""How fast KV moves between two processes of one host in shared memory, against a memcpy.

    python -m tandem.tests.benchmarks.handoff_shared_memory

Three variants take turns: a memcpy of the cold source in one process, the carrier alone (copied
into the sender's ring, and out of it again by the receiver), and whole transfers (pack, checksum,
carrier, verify, scatter).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from tandem.shared.handoff.carrier import Departure, Endpoints
from tandem.shared.handoff.carrier_names import SHARED_MEMORY
from tandem.shared.handoff.greeting import PeerKey
from tandem.shared.handoff.shared_ring import SharedRing
from tandem.shared.handoff.staging import Slot, StagingRing
from tandem.shared.handoff.stats import DataPlaneStats
from tandem.shared.handoff.zmq_dialer import ZmqDialer
from tandem.shared.handoff.zmq_listener import ZmqListener
from tandem.shared.handoff.zmq_sockets import Timing

from .handoff_pair import (
    MIB,
    SLOTS,
    Variant,
    control_overhead,
    greeting,
    row,
    take_turns,
    whole_transfers,
)
from .report import write

AGAINST = "memcpy, same cold source, same run"
TIMING = Timing(silence_seconds=60.0)


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


def ring_sender(pipe: Connection, size: int, rounds: int) -> None:
    source = np.ones(size, np.uint8).data
    shared = SharedRing(SLOTS * StagingRing.stride(MIB))
    ring = StagingRing(slots=SLOTS, payload_bytes=MIB, memory=shared.memory)
    context: zmq.Context[Any] = zmq.Context()
    me = greeting("p", 1, SHARED_MEMORY).with_ring(shared.place)
    listener = ZmqListener(
        context, me, host="127.0.0.1", port=0, timing=TIMING, stats=DataPlaneStats()
    )
    pipe.send(listener.start())
    peer = PeerKey(node_id="d", epoch=2, rank=0)
    while not listener.is_live(peer):
        listener.receive_control(time.monotonic())
    poller = zmq.Poller()
    for each in listener.sockets():
        poller.register(each, zmq.POLLIN)
    lent: deque[tuple[Slot, Departure]] = deque()
    for _ in range(rounds):
        pipe.recv()
        for at in range(0, size, MIB):
            while len(lent) >= listener.slots_for(peer):
                poller.poll(1000)
                listener.receive_control(time.monotonic())
                while lent and lent[0][1].done:
                    ring.release(lent.popleft()[0])
            slot = ring.acquire()
            assert slot is not None
            slot.payload[:] = source[at : at + MIB]
            lent.append((slot, listener.send_bulk(peer, slot.buffer, slot.offset)))
    pipe.recv()
    listener.close()
    context.destroy(linger=0)


def ring_receiver(pipe: Connection, size: int, rounds: int) -> None:
    endpoints: Endpoints = pipe.recv()
    target = np.ones(size, np.uint8).data
    context: zmq.Context[Any] = zmq.Context()
    dialer = ZmqDialer(
        context, greeting("d", 2, SHARED_MEMORY), max_frame_bytes=2 * MIB, timing=TIMING
    )
    peer = PeerKey(node_id="p", epoch=1, rank=0)
    dialer.connect(peer, endpoints, time.monotonic())
    while not dialer.is_live(peer):
        dialer.receive_control(time.monotonic())
    poller = zmq.Poller()
    for each in dialer.sockets():
        poller.register(each, zmq.POLLIN)
    pipe.send(None)
    for _ in range(rounds):
        at = 0
        while at < size:
            poller.poll(1000)
            while taken := dialer.receive_bulk(time.monotonic()):
                target[at : at + MIB] = taken[1][-MIB:]
                at += MIB
        pipe.send(None)
    dialer.close()
    context.destroy(linger=0)


# ---- the run -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    size = options.mib * MIB
    variants = {
        "memcpy": Memcpy(idle_sender, copier, size, options.rounds),
        "carrier": Variant(ring_sender, ring_receiver, size, options.rounds),
        "full": Variant(*whole_transfers(SHARED_MEMORY), size, options.rounds),
    }
    rates = take_turns(variants, options.rounds)
    memcpy, carrier, full = (rates[name] for name in variants)
    rows = [
        {"metric": "memcpy", "value": statistics.median(memcpy), "unit": "GB/s"},
        row("carrier alone: into the ring and out of it", carrier, memcpy, ">=0.6", AGAINST),
        row("pack + carrier + scatter", full, memcpy, "", AGAINST),
        {
            "metric": "control overhead of a transfer, median",
            "value": control_overhead(SHARED_MEMORY),
            "unit": "ms",
            "goal": "<=3",
        },
    ]
    for each in rows:
        print({key: round(v, 3) if isinstance(v, float) else v for key, v in each.items()})
    print(write("handoff_shared_memory", rows))


if __name__ == "__main__":
    main()
