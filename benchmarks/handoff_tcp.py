"""Throughput of KV between two processes over loopback TCP, against a raw socket.

    python -m tandem.benchmarks.handoff_tcp

Three variants take turns: a raw socket, the carrier alone (frames straight from the source, read
and dropped), and whole transfers (pack, checksum, wire, verify, scatter). ``--curve`` adds whole
transfers between locked data planes.
"""

from __future__ import annotations

import socket
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import xxhash
import zmq

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
from tandem.benchmarks.support.handoff_ring import (
    RECEIVER,
    SENDER,
    TIMING,
    ReceivingEnd,
    carriers_of,
)
from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.shared.handoff.carriers.tcp import NAME as TCP
from tandem.shared.handoff.carriers.zeromq.listener import ZmqListener
from tandem.shared.handoff.wire import frame

AGAINST = "raw socket, same cold source, same run"


# ---- a raw socket ------------------------------------------------------------------------------


def raw_sender(pipe: Connection, size: int, rounds: int) -> None:
    source = np.ones(size, np.uint8).data
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname())
        peer, _ = server.accept()
    with peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MIB)
        for _ in range(rounds):
            pipe.recv()
            for at in range(0, size, MIB):
                peer.sendall(source[at : at + MIB])
        pipe.recv()


def raw_receiver(pipe: Connection, size: int, rounds: int) -> None:
    with socket.create_connection(pipe.recv()) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MIB)
        buffer = memoryview(bytearray(MIB))
        pipe.send(None)
        for _ in range(rounds):
            remaining = size
            while remaining:
                remaining -= peer.recv_into(buffer[: min(remaining, MIB)])
            pipe.send(None)


# ---- the carrier alone -------------------------------------------------------------------------


def wire_sender(pipe: Connection, size: int, rounds: int) -> None:
    source = np.ones(size, np.uint8).data
    context: zmq.Context[Any] = zmq.Context()
    carriers = carriers_of(SENDER, TCP, sends=True)
    listener = ZmqListener(
        context,
        greeting(SENDER, carriers.hellos()),
        carriers,
        host="127.0.0.1",
        port=0,
        timing=TIMING,
    )
    pipe.send(listener.start())
    while not listener.is_live(RECEIVER):
        listener.receive_control(time.monotonic())
    for _ in range(rounds):
        pipe.recv()
        departures: list[Any] = []
        for at in range(0, size, MIB):
            while len(departures) >= WINDOW // MIB and not departures[-WINDOW // MIB].done:
                time.sleep(0.0001)
            departures.append(listener.send_bulk(RECEIVER, source[at : at + MIB]))
    pipe.recv()
    listener.close()
    context.destroy(linger=0)
    carriers.close()


def wire_receiver(pipe: Connection, size: int, rounds: int) -> None:
    receiving = ReceivingEnd(TCP, pipe.recv())
    messages = receiving.messages()
    pipe.send(None)
    for _ in range(rounds):
        for _ in range(size // MIB):
            next(messages)
        pipe.send(None)
    receiving.close()


# ---- the run -----------------------------------------------------------------------------------


def checksum_rate(size: int) -> float:
    """Checksum rate in GB/s, frame by frame over recently filled staging slots, as in a
    transfer."""
    source, slots = np.ones(size, np.uint8), np.empty((WINDOW // MIB, MIB), np.uint8)
    elapsed = 0.0
    for number in range(size // MIB):
        slot = slots[number % len(slots)]
        slot[:] = source[number * MIB : (number + 1) * MIB]
        began = time.perf_counter()
        xxhash.xxh3_64_intdigest(slot.data, frame.VERSION)
        elapsed += time.perf_counter() - began
    return size / elapsed / 1e9


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=11)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--curve", action="store_true", help="measure locked planes as well")
    options = parser.parse_args()
    size = options.mib * MIB
    sides = {
        "raw": (raw_sender, raw_receiver),
        "wire": (wire_sender, wire_receiver),
        "full": whole_transfers(TCP),
    }
    if options.curve:
        sides["curve"] = whole_transfers(TCP, curve=True)
    rates = take_turns(
        {name: Variant(*pair, size, options.rounds) for name, pair in sides.items()},
        options.rounds,
    )
    raw, wire, full = (rates[name] for name in ("raw", "wire", "full"))
    rows = [
        {"metric": "raw socket", "value": statistics.median(raw), "unit": "GB/s"},
        row("carrier alone", wire, raw, ">=0.7", AGAINST),
        row("pack + wire + scatter", full, raw, ">=0.5", AGAINST),
        {
            "metric": "checksum, share of a transfer on each side",
            "value": statistics.median(full) / checksum_rate(size),
            "unit": "1",
            "goal": "<=0.05",
        },
        {
            "metric": "control overhead of a transfer, median",
            "value": control_overhead(TCP),
            "unit": "ms",
            "goal": "<=3",
        },
    ]
    if options.curve:
        rows.append(row("the same, locked", rates["curve"], full, "", "pack + wire + scatter"))
    publish("handoff_tcp", rows, dry=options.dry)


if __name__ == "__main__":
    main()
