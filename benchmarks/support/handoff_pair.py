"""Two processes that transfer KV, for the benchmarks of the carriers.

Every variant moves the same cold source (larger than the last-level cache) between two processes of
their own, in turns within one run.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import Queue
from typing import Any, TypeVar

import numpy as np

from tandem.benchmarks.support.handoff_cache import BLOCK, CELL, HEADS, host_cache
from tandem.shared.handoff.carriers.device import Device
from tandem.shared.handoff.carriers.transport import Endpoints
from tandem.shared.handoff.plane.cache_port import CachePort
from tandem.shared.handoff.plane.endpoint import DataPlane
from tandem.shared.handoff.plane.messages import (
    AdmitKeys,
    DataPlaneStats,
    Expect,
    Expecting,
    KeysAdmitted,
    OpenSend,
    PeerJoined,
    Received,
    SendFinished,
)
from tandem.shared.handoff.plane.settings import DataPlaneConfig
from tandem.shared.handoff.wire.greeting import Greeting, PeerKey
from tandem.shared.handoff.wire.head_parts import HeadRun
from tandem.tests.support.layers_ready import layer_ready

MIB = 1 << 20
LAYERS = 16
WINDOW = 16 * MIB
SLOTS = 16
MOVE_SECONDS = 120.0


def side_by_side(tokens: int, _: int) -> tuple[int, ...]:
    """Contiguous blocks, as in a cache with free space."""
    return tuple(range(tokens // BLOCK))


def shuffled(tokens: int, seed: int) -> tuple[int, ...]:
    """Blocks in random order, as in a nearly full cache."""
    order = np.random.default_rng(seed).permutation(tokens // BLOCK)
    return tuple(int(block) for block in order)


def greeting(me: PeerKey, offers: Mapping[str, bytes]) -> Greeting:
    return Greeting(
        max_payload=1 << 20,
        node_id=me.node_id, epoch=me.epoch, rank=0, tp_size=1, dtype="bfloat16", host="here",
        offers=offers,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a pair: a cache of layers and tokens, the device under it, and the blocks of
    a prompt."""

    make: Callable[[int, int], tuple[CachePort, Device | None]] = host_cache
    window: int = WINDOW
    table: Callable[[int, int], tuple[int, ...]] = shuffled  # of a number of tokens, by a seed
    layers: int = LAYERS


ON_HOST = Ranks()


# ---- whole transfers ---------------------------------------------------------------------------


def plane_of(
    name: str,
    epoch: int,
    tokens: int,
    carrier: str,
    *,
    listen: bool,
    ranks: Ranks,
    curve: bool = False,
) -> tuple[DataPlane, Queue[Any]]:
    events: Queue[Any] = Queue()
    config = DataPlaneConfig(
        node_id=name,
        epoch=epoch,
        listen_host="127.0.0.1" if listen else None,
        staging_slots=SLOTS,
        carrier=carrier,
        curve=curve,
    )
    cache, device = ranks.make(ranks.layers, tokens)
    plane = DataPlane(config, cache, events.put, device=device)
    plane.start()
    return plane, events


def await_event(events: Queue[Any], kind: type) -> Any:
    """The next event of this kind; counters and greetings are skipped."""
    while isinstance(event := events.get(timeout=60), DataPlaneStats | PeerJoined):
        pass
    assert isinstance(event, kind), event
    return event


def whole_transfers(
    carrier: str, *, curve: bool = False, ranks: Ranks = ON_HOST
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Both sides of pack, checksum, carrier, verify and scatter."""
    # In place of the control plane: carries the receiver's key to the sender.
    curve_pipe, telling = multiprocessing.get_context("spawn").Pipe(duplex=False)
    return (
        functools.partial(
            _full_sender, carrier=carrier, ranks=ranks, curve_pipe=curve_pipe if curve else None
        ),
        functools.partial(
            _full_receiver, carrier=carrier, ranks=ranks, telling=telling if curve else None
        ),
    )


def _full_sender(
    pipe: Connection,
    size: int,
    rounds: int,
    carrier: str,
    ranks: Ranks,
    curve_pipe: Connection | None,
) -> None:
    tokens = size // LAYERS // CELL
    curve = curve_pipe is not None
    plane, events = plane_of("p", 1, tokens, carrier, listen=True, ranks=ranks, curve=curve)
    if curve_pipe is not None:
        plane.submit(AdmitKeys(version=1, keys=(curve_pipe.recv(),)))
        await_event(events, KeysAdmitted)
    pipe.send(plane.endpoints)
    for number in range(rounds):
        pipe.recv()
        plane.submit(open_send(number, tokens, ranks))
        layer_ready(plane, number, 1, 0, 0, tokens, LAYERS)
        await_event(events, SendFinished)
    pipe.recv()
    plane.stop()


def _full_receiver(
    pipe: Connection,
    size: int,
    rounds: int,
    carrier: str,
    ranks: Ranks,
    telling: Connection | None,
) -> None:
    tokens = size // LAYERS // CELL
    curve = telling is not None
    plane, events = plane_of("d", 2, tokens, carrier, listen=False, ranks=ranks, curve=curve)
    if telling is not None:
        telling.send(plane.endpoints.key)
    endpoints: Endpoints = pipe.recv()
    for number in range(rounds):
        plane.submit(expect(number, tokens, endpoints, ranks))
        await_event(events, Expecting)
        pipe.send(None)
        await_event(events, Received)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        pipe.recv()  # the sender still waits for the last ack
    plane.stop()


def open_send(number: int, tokens: int, ranks: Ranks = ON_HOST) -> OpenSend:
    return OpenSend(
        transfer_id=number, attempt=1, peer_node="d", peer_epoch=2, peer_rank=0,
        block_table=ranks.table(tokens, 1), first_token=0, end_token=tokens,
        heads=(HeadRun(ranks.layers, 0, HEADS),), window_bytes=ranks.window, dtype="bfloat16",
    )  # fmt: skip


def expect(number: int, tokens: int, endpoints: Endpoints, ranks: Ranks = ON_HOST) -> Expect:
    return Expect(
        transfer_id=number, attempt=1, peer_node="p", peer_epoch=1, peer_rank=0,
        bulk=endpoints.bulk, control=endpoints.control, key=endpoints.key,
        block_table=ranks.table(tokens, 2), first_token=0, end_token=tokens,
        heads=(HeadRun(ranks.layers, 0, HEADS),), window_bytes=ranks.window,
    )  # fmt: skip


# ---- the run -----------------------------------------------------------------------------------


def _on_core(core: int | None, side: Callable, *args: Any) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    side(*args)


class Variant:
    """Two processes that move the source once for each ``move``; each on a core of its own where
    ``cores`` are given."""

    def __init__(
        self,
        sender: Callable,
        receiver: Callable,
        size: int,
        rounds: int,
        cores: Sequence[int | None] = (None, None),
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.size = size
        pairs = [spawn.Pipe() for _ in range(2)]
        self.sending, self.receiving = pairs[0][0], pairs[1][0]
        self.processes = [
            spawn.Process(target=_on_core, args=(core, side, pair[1], size, rounds), daemon=True)
            for core, side, pair in zip(cores, (sender, receiver), pairs, strict=True)
        ]
        for process in self.processes:
            process.start()
        self.receiving.send(self.sending.recv())
        self.receiving.recv()  # connected

    def move(self) -> float:
        """GB/s from the start until the last byte is in place."""
        began = time.perf_counter()
        self.sending.send(None)
        if not self.receiving.poll(MOVE_SECONDS):
            raise SystemExit(f"nothing arrived within {MOVE_SECONDS} s; a side has died")
        self.receiving.recv()
        return self.size / (time.perf_counter() - began) / 1e9

    def finish(self) -> None:
        self.sending.send(None)
        self.processes[0].join(20)
        self.receiving.close()
        self.processes[1].join(20)


def control_overhead(carrier: str, count: int = 200) -> float:
    """Milliseconds at the median from Expect to Received, for one block of one layer."""
    ranks = Ranks(layers=1)
    sender, sender_events = plane_of("p", 1, 4 * BLOCK, carrier, ranks=ranks, listen=True)
    receiver, received = plane_of("d", 2, 4 * BLOCK, carrier, ranks=ranks, listen=False)
    times = []
    for number in range(count):
        began = time.perf_counter()
        receiver.submit(expect(number, BLOCK, sender.endpoints, ranks))
        await_event(received, Expecting)
        sender.submit(open_send(number, BLOCK, ranks))
        layer_ready(sender, number, 1, 0, 0, BLOCK)
        await_event(received, Received)
        times.append(time.perf_counter() - began)
        await_event(sender_events, SendFinished)
    receiver.stop()
    sender.stop()
    return 1e3 * statistics.median(times[1:])


K = TypeVar("K")


def take_turns(variants: dict[K, Variant], rounds: int) -> dict[K, list[float]]:
    """GB/s of each, a round each in turn. The first round warms connections and page tables, and in
    the last one the processes of the variants before are ending: neither counts. Ratios are to be
    taken within a round, where a noisy neighbour hits all."""
    rates: dict[K, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            rates[name].append(variant.move())
    for variant in variants.values():
        variant.finish()
    return {name: values[1:-1] for name, values in rates.items()}


def row(
    metric: str, rates: list[float], base: list[float], goal: str, against: str
) -> dict[str, Any]:
    """One line of the report: the median of the rates, and of their ratios to the base."""
    return {
        "metric": metric,
        "value": statistics.median(rates),
        "unit": "GB/s",
        "goal": goal,
        "against": against,
        "ratio": statistics.median(a / b for a, b in zip(rates, base, strict=True)),
    }
