"""How fast KV moves between two processes over loopback TCP, against a raw socket.

    python -m tandem.tests.benchmarks.handoff_tcp

Every variant moves the same cold source (larger than the last-level cache) between two processes of
their own, in turns within one run: a raw socket, the carrier alone (frames straight from the
source, read and dropped), and whole transfers (pack, checksum, wire, verify, scatter).
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from queue import Queue
from typing import Any

import numpy as np
import xxhash
import zmq

from tandem.shared.handoff import frame
from tandem.shared.handoff.carrier import Endpoints
from tandem.shared.handoff.data_plane import DataPlane, DataPlaneConfig
from tandem.shared.handoff.greeting import Greeting, PeerKey
from tandem.shared.handoff.messages import (
    DataPlaneStats,
    Expect,
    Expecting,
    OpenSend,
    Received,
    SendFinished,
)
from tandem.shared.handoff.zmq_carrier import Timing, ZmqDialer, ZmqListener

from .report import write

MIB = 1 << 20
HEADS, DIM_BYTES, BLOCK = 8, 256, 16
CELL = 2 * HEADS * DIM_BYTES
LAYERS = 16
WINDOW = 16 * MIB
MOVE_SECONDS = 120.0


class ArrayCache:
    """A cache as a rank has it: for each layer ``[K|V][head][block][slot][dim]``, in numpy."""

    def __init__(self, layers: int, tokens: int) -> None:
        self.num_layers = layers
        self.layer_bytes_per_token = CELL
        shape = (layers, 2 * HEADS, tokens // BLOCK, BLOCK * DIM_BYTES)
        self.data = np.empty(shape, dtype=np.uint8)
        self.data.fill(1)

    def pack(self, layer: int, table: Sequence[int], first: int, end: int, out: memoryview) -> None:
        blocks = _blocks(table, first, end)
        view = np.frombuffer(out, np.uint8).reshape(2 * HEADS, len(blocks), -1)
        np.take(self.data[layer], blocks, axis=1, out=view, mode="clip")

    def scatter(
        self, layer: int, table: Sequence[int], first: int, end: int, data: memoryview
    ) -> None:
        blocks = _blocks(table, first, end)
        self.data[layer][:, blocks] = np.frombuffer(data, np.uint8).reshape(
            2 * HEADS, len(blocks), -1
        )


def _blocks(table: Sequence[int], first: int, end: int) -> np.ndarray:
    assert first % BLOCK == end % BLOCK == 0, "this cache moves whole blocks"
    return np.asarray(table[first // BLOCK : end // BLOCK])


def _shuffled(tokens: int, seed: int) -> tuple[int, ...]:
    order = np.random.default_rng(seed).permutation(tokens // BLOCK)
    return tuple(int(block) for block in order)


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
            left = size
            while left:
                left -= peer.recv_into(buffer[: min(left, MIB)])
            pipe.send(None)


# ---- the carrier alone -------------------------------------------------------------------------


def _me(name: str, epoch: int) -> Greeting:
    return Greeting(
        node_id=name, epoch=epoch, rank=0, tp_size=1, dtype="bfloat16", num_layers=1,
        layer_bytes_per_token=CELL, first_head=0, end_head=HEADS,
    )  # fmt: skip


def wire_sender(pipe: Connection, size: int, rounds: int) -> None:
    source = np.ones(size, np.uint8).data
    context: zmq.Context[Any] = zmq.Context()
    listener = ZmqListener(
        context, _me("p", 1), host="127.0.0.1", port=0, max_frame_bytes=2 * MIB, timing=Timing(
            silence_seconds=60.0
        ),
    )  # fmt: skip
    pipe.send(listener.start())
    peer = PeerKey(node_id="d", epoch=2, rank=0)
    while not listener.is_live(peer):
        listener.receive_control(time.monotonic())
    for _ in range(rounds):
        pipe.recv()
        departures: list[Any] = []
        for at in range(0, size, MIB):
            while len(departures) >= WINDOW // MIB and not departures[-WINDOW // MIB].done:
                time.sleep(0.0001)
            departures.append(listener.send_bulk(peer, source[at : at + MIB]))
    pipe.recv()
    listener.close()
    context.destroy(linger=0)


def wire_receiver(pipe: Connection, size: int, rounds: int) -> None:
    endpoints: Endpoints = pipe.recv()
    context: zmq.Context[Any] = zmq.Context()
    dialer = ZmqDialer(
        context, _me("d", 2), max_frame_bytes=2 * MIB, timing=Timing(silence_seconds=60.0)
    )
    peer = PeerKey(node_id="p", epoch=1, rank=0)
    dialer.connect(peer, endpoints, time.monotonic())
    while not dialer.is_live(peer):
        dialer.receive_control(time.monotonic())
    bulk = next(iter(dialer.sockets()))
    pipe.send(None)
    for _ in range(rounds):
        left = size
        while left:
            bulk.poll(1000)
            while taken := dialer.receive_bulk(time.monotonic()):
                left -= len(taken[1])
        pipe.send(None)
    dialer.close()
    context.destroy(linger=0)


# ---- whole transfers ---------------------------------------------------------------------------


def _plane(
    name: str, epoch: int, tokens: int, *, listen: bool, layers: int = LAYERS
) -> tuple[DataPlane, Queue[Any]]:
    events: Queue[Any] = Queue()
    config = DataPlaneConfig(
        node_id=name,
        epoch=epoch,
        end_head=HEADS,
        listen_host="127.0.0.1" if listen else None,
        staging_slots=32,
    )
    plane = DataPlane(config, ArrayCache(layers, tokens), events.put)
    plane.start()
    return plane, events


def _await(events: Queue[Any], kind: type) -> Any:
    """The next event, which is of this kind; counters come in between and are of no interest."""
    while isinstance(event := events.get(timeout=60), DataPlaneStats):
        pass
    assert isinstance(event, kind), event
    return event


def full_sender(pipe: Connection, size: int, rounds: int) -> None:
    tokens = size // LAYERS // CELL
    plane, events = _plane("p", 1, tokens, listen=True)
    pipe.send(plane.endpoints)
    for number in range(rounds):
        pipe.recv()
        plane.submit(_open_send(number, tokens))
        plane.layer_ready(number, 1, 0, 0, tokens, LAYERS)
        _await(events, SendFinished)
    pipe.recv()
    plane.stop()


def full_receiver(pipe: Connection, size: int, rounds: int) -> None:
    tokens = size // LAYERS // CELL
    endpoints: Endpoints = pipe.recv()
    plane, events = _plane("d", 2, tokens, listen=False)
    for number in range(rounds):
        plane.submit(_expect(number, tokens, endpoints))
        _await(events, Expecting)
        pipe.send(None)
        _await(events, Received)
    pipe.send(None)
    plane.stop()


def _open_send(number: int, tokens: int) -> OpenSend:
    return OpenSend(
        transfer_id=number, attempt=1, peer_node="d", peer_epoch=2, peer_rank=0,
        block_table=_shuffled(tokens, 1), first_token=0, end_token=tokens, window_bytes=WINDOW,
    )  # fmt: skip


def _expect(number: int, tokens: int, endpoints: Endpoints) -> Expect:
    return Expect(
        transfer_id=number, attempt=1, peer_node="p", peer_epoch=1, peer_rank=0,
        bulk=endpoints.bulk, control=endpoints.control, block_table=_shuffled(tokens, 2),
        first_token=0, end_token=tokens, window_bytes=WINDOW,
    )  # fmt: skip


# ---- the run -----------------------------------------------------------------------------------


class Variant:
    """Two processes that move the source once for each ``move``."""

    def __init__(self, sender: Callable, receiver: Callable, size: int, rounds: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.size = size
        pairs = [spawn.Pipe() for _ in range(2)]
        self.sending, self.receiving = pairs[0][0], pairs[1][0]
        self.processes = [
            spawn.Process(target=side, args=(pair[1], size, rounds), daemon=True)
            for side, pair in zip((sender, receiver), pairs, strict=True)
        ]
        for process in self.processes:
            process.start()
        self.receiving.send(self.sending.recv())
        self.receiving.recv()  # connected

    def move(self) -> float:
        """GB/s from the word to go until the last byte is where it belongs."""
        began = time.perf_counter()
        self.sending.send(None)
        if not self.receiving.poll(MOVE_SECONDS):
            raise SystemExit(f"nothing arrived within {MOVE_SECONDS} s; a side has died")
        self.receiving.recv()
        return self.size / (time.perf_counter() - began) / 1e9

    def finish(self) -> None:
        self.sending.send(None)
        for process in self.processes:
            process.join(20)


def control_overhead(count: int = 200) -> float:
    """Milliseconds at the median from Expect to Received, for one block of one layer."""
    sender, sent = _plane("p", 1, 4 * BLOCK, listen=True, layers=1)
    receiver, received = _plane("d", 2, 4 * BLOCK, listen=False, layers=1)
    times = []
    for number in range(count):
        began = time.perf_counter()
        receiver.submit(_expect(number, BLOCK, sender.endpoints))
        _await(received, Expecting)
        sender.submit(_open_send(number, BLOCK))
        sender.layer_ready(number, 1, 0, 0, BLOCK)
        _await(received, Received)
        times.append(time.perf_counter() - began)
        _await(sent, SendFinished)
    receiver.stop()
    sender.stop()
    return 1e3 * statistics.median(times[1:])


def checksum_rate(size: int) -> float:
    """GB/s, frame by frame over staging slots that were filled a moment ago, as in a transfer."""
    source, slots = np.ones(size, np.uint8), np.empty((WINDOW // MIB, MIB), np.uint8)
    spent = 0.0
    for number in range(size // MIB):
        slot = slots[number % len(slots)]
        slot[:] = source[number * MIB : (number + 1) * MIB]
        began = time.perf_counter()
        xxhash.xxh3_64_intdigest(slot.data, frame.VERSION)
        spent += time.perf_counter() - began
    return size / spent / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    size = options.mib * MIB
    sides = {
        "raw": (raw_sender, raw_receiver),
        "wire": (wire_sender, wire_receiver),
        "full": (full_sender, full_receiver),
    }
    variants = {name: Variant(*pair, size, options.rounds) for name, pair in sides.items()}
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, variant in variants.items():
            rates[name].append(variant.move())
    for variant in variants.values():
        variant.finish()
    # The first round warms connections and page tables. Ratios are taken within a round, where
    # a noisy neighbour hits all variants alike, and then the median of them.
    raw, wire, full = (rates[name][1:] for name in ("raw", "wire", "full"))
    rows = [
        {"metric": "raw socket", "value": statistics.median(raw), "unit": "GB/s"},
        _row("carrier alone", wire, raw, ">=0.7"),
        _row("pack + wire + scatter", full, raw, ">=0.5"),
        {
            "metric": "checksum, share of a transfer on each side",
            "value": statistics.median(full) / checksum_rate(size),
            "unit": "1",
            "goal": "<=0.05",
        },
        {
            "metric": "control overhead of a transfer, median",
            "value": control_overhead(),
            "unit": "ms",
            "goal": "<=3",
        },
    ]
    for row in rows:
        print({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()})
    print(write("handoff_tcp", rows))


def _row(metric: str, rates: list[float], raw: list[float], goal: str) -> dict[str, Any]:
    return {
        "metric": metric,
        "value": statistics.median(rates),
        "unit": "GB/s",
        "goal": goal,
        "against": "raw socket, same cold source, same run",
        "ratio": statistics.median(a / b for a, b in zip(rates, raw, strict=True)),
    }


if __name__ == "__main__":
    main()
