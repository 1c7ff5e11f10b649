"""The data plane beside a thread that launches small operators, as the engine's does on a GPU.

    python -m tandem.benchmarks.node.plane_beside_launches

A batch is 600 operators, about a decode step's launches. Batches run alone, and beside the plane of
the same process: while the layers of a transfer are announced but not yet computed, while its
frames leave or arrive, and for comparison while layers are pending and the plane looks for them
every millisecond. The variants take turns.

Frames move at the rate at which an H200 computes Llama-3-8B's KV in chunks of 8,192 tokens
(results/GPU.md: 230 ms for 1 GiB), and at three times that.

The peer is another process, so that only one plane shares Python's lock with the launches, which
have a core of their own. All of it is what a rank runs beside a GPU, by CUDA IPC and in frames of
32 MiB, but for the GPU: a layer is computed when a clock says so, a frame is packed or scattered by
one operator of the CPU, and its bytes, which a GPU copies without the lock, stay where they are.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

from tandem.benchmarks.support.cores import two_cores
from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.kernels.row_sums import rows_of
from tandem.shared.handoff.carriers.cuda_ipc import NAME as CUDA_IPC
from tandem.shared.handoff.carriers.device import DEVICE_SLOT_BYTES
from tandem.shared.handoff.plane.computed_layers import ComputedLayers
from tandem.shared.handoff.plane.messages import LayerReady, Received, SendFinished
from tandem.shared.handoff.wire.head_parts import HeadRun
from tandem.shared.kv.copying import Copying, finished
from tandem.shared.process.garbage import collect_rarely
from tandem.tests.shared.handoff.support.fake_driver import FakeDevice, FakeDriver
from tandem.tests.shared.handoff.support.memory_cache import layer_of
from tandem.tests.shared.handoff.support.plane_pair import PlaneRank

OPERATORS = 600
# Bytes a second: of a prefill, and more than one computes.
USUAL, FAST = 4.7e9, 15e9
TURN_SECONDS = 0.001
# A layer's KV of a chunk is a frame.
LAYERS, HEADS, HEAD_BYTES, BLOCK = 32, 8, 256, 16
CHUNK = DEVICE_SLOT_BYTES // (2 * HEADS * HEAD_BYTES)
# From the announcement to the first layer.
_LEAD_SECONDS = 0.1
# Until a frame is packed, which a thread of its own waits for if nothing else comes.
_PACK_SECONDS = 0.0001
# Share of the frames that must have moved when the last layer is computed.
_ON_TIME = 0.95
_SUMS = bytes(8 * rows_of(DEVICE_SLOT_BYTES))


class NoBytes(FakeDriver):
    """A GPU whose copies take no time of the CPU."""

    def copy(self, into: int, source: int, length: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Until:
    """A ``Wait`` for a time."""

    at: float

    def __call__(self) -> None:
        _sleep_until(self.at)

    def is_over(self) -> bool:
        return time.monotonic() >= self.at


class LaunchingCache:
    """A ``CachePort`` that launches an operator for each frame, which another thread waits for."""

    kv_dtype = "bfloat16"
    sums_on_the_way = True
    layout = (layer_of(range(HEADS), HEAD_BYTES),) * LAYERS

    def __init__(self) -> None:
        self._x = torch.ones(8)

    def pack_frame(self, *_: Any) -> Copying:
        torch.add(self._x, 1)
        return Copying(Until(time.monotonic() + _PACK_SECONDS), lambda: _SUMS)

    def scatter_frame(self, *_: Any) -> Copying:
        torch.add(self._x, 1)
        return finished(lambda: _SUMS)


def rank_of(name: str, epoch: int) -> PlaneRank:
    cache: Any = LaunchingCache()
    return PlaneRank(
        name,
        cache=cache,
        epoch=epoch,
        carrier=CUDA_IPC,
        device=FakeDevice(NoBytes()),
        slot_bytes=2 * HEADS * HEAD_BYTES,
        device_slot_bytes=DEVICE_SLOT_BYTES,
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """A transfer of some chunks, whose layers are computed at a rate, in bytes a second, from
    ``at`` on."""

    number: int
    chunks: int
    rate: float = FAST
    at: float = 0.0

    @property
    def frames(self) -> int:
        return self.chunks * LAYERS

    def computed_at(self, frame: int) -> float:
        return self.at + frame * DEVICE_SLOT_BYTES / self.rate

    @property
    def table(self) -> tuple[int, ...]:
        return tuple(range(self.chunks * CHUNK // BLOCK))

    @property
    def part(self) -> dict[str, Any]:
        heads = (HeadRun(LAYERS, 0, HEADS),)
        return {"first_token": 0, "end_token": self.chunks * CHUNK, "heads": heads}


class Rank:
    """A rank and its transfers with the rank of another process."""

    def __init__(self, own: PlaneRank, pipe: Connection) -> None:
        self.own = own
        self._wait: Callable[[], Any]
        self._computed = ComputedLayers(lambda: self._wait, own.plane.submit, LAYERS)
        pipe.send((own.config, own.plane.endpoints))
        config, endpoints = pipe.recv()
        self._peer = SimpleNamespace(config=config, plane=SimpleNamespace(endpoints=endpoints))

    def expect(self, prompt: Prompt) -> None:
        self.own.expect(self._peer, prompt.number, prompt.table, **prompt.part)

    def send(self, prompt: Prompt, wait: Callable[[], Any] | None = None) -> None:
        """Announce all layers. ``wait`` sleeps until they are computed, if not at their times."""
        self.own.open(self._peer, prompt.number, prompt.table, **prompt.part)
        for frame in range(prompt.frames):
            chunk, layer = divmod(frame, LAYERS)
            self._wait = wait or Until(prompt.computed_at(frame))
            ready = LayerReady(
                transfer_id=prompt.number,
                attempt=1,
                first_layer=layer,
                end_layer=layer + 1,
                first_token=chunk * CHUNK,
                end_token=(chunk + 1) * CHUNK,
            )
            self._computed.announce([ready])

    def await_end(self, kind: type[SendFinished | Received], prompt: Prompt) -> None:
        self.own.log.wait(kind, prompt.number, seconds=60)


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def other_rank(pipe: Connection) -> None:
    """The peer's process, which does what it is told until the pipe is closed. It runs where this
    rank's plane leaves room."""
    torch.set_num_threads(1)
    os.nice(19)
    with rank_of("other", 2) as own, contextlib.suppress(EOFError):
        collect_rarely()  # as a rank
        rank = Rank(own, pipe)
        while True:
            prompt, sends = pipe.recv()
            if sends:
                rank.send(prompt)
            else:
                rank.expect(prompt)
            pipe.send(None)
            rank.await_end(SendFinished if sends else Received, prompt)
            pipe.send(None)


class Beside:
    """Transfers beside the launches. Each variant yields the time until which it lasts."""

    def __init__(self, rank: Rank, pipe: Connection, seconds: float) -> None:
        self._rank, self._pipe, self._seconds = rank, pipe, seconds
        self._number = 0

    def _prompt(self, rate: float) -> Prompt:
        self._number += 1
        chunks = max(1, round(self._seconds * rate / DEVICE_SLOT_BYTES / LAYERS))
        return Prompt(self._number, chunks, rate, time.monotonic() + _LEAD_SECONDS)

    def _tell(self, prompt: Prompt, *, sends: bool) -> None:
        self._pipe.send((prompt, sends))
        self._pipe.recv()

    @contextmanager
    def alone(self) -> Iterator[float]:
        yield time.monotonic() + self._seconds

    @contextmanager
    def pending(self) -> Iterator[float]:
        """Layers are announced, and computed at the end."""
        prompt, computed = self._prompt(USUAL), threading.Event()
        self._tell(prompt, sends=False)
        self._rank.send(prompt, computed.wait)
        yield time.monotonic() + self._seconds
        computed.set()
        self._rank.await_end(SendFinished, prompt)
        self._pipe.recv()

    @contextmanager
    def polling(self) -> Iterator[float]:
        """The plane takes a turn every millisecond, as if it polled for its layers."""
        over = threading.Event()
        waking = threading.Thread(target=self._wake, args=(over,))
        with self.pending() as end:
            waking.start()
            try:
                yield end
            finally:
                over.set()
                waking.join()

    def _wake(self, over: threading.Event) -> None:
        while not over.wait(TURN_SECONDS):
            self._rank.own.plane._commands.wake()

    @contextmanager
    def leaving(self, rate: float) -> Iterator[float]:
        """Frames leave at a steady rate."""
        prompt = self._prompt(rate)
        self._tell(prompt, sends=False)
        self._rank.send(prompt)
        with self._steady(prompt) as end:
            yield end
        self._rank.await_end(SendFinished, prompt)
        self._pipe.recv()

    @contextmanager
    def arriving(self, rate: float) -> Iterator[float]:
        """Frames arrive at a steady rate."""
        prompt = self._prompt(rate)
        self._rank.expect(prompt)
        self._tell(prompt, sends=True)
        with self._steady(prompt) as end:
            yield end
        self._rank.await_end(Received, prompt)
        self._pipe.recv()

    @contextmanager
    def _steady(self, prompt: Prompt) -> Iterator[float]:
        """While layers are computed. Raises ``SystemExit`` if their frames were late."""
        before = self._frames()
        _sleep_until(prompt.at)
        yield prompt.computed_at(prompt.frames)
        moved = self._frames() - before
        if moved < _ON_TIME * prompt.frames:
            raise SystemExit(f"only {moved} of {prompt.frames} frames moved in time")

    def _frames(self) -> int:
        stats = self._rank.own.plane.stats()
        return stats.frames_sent + stats.frames_received


def launch(x: torch.Tensor) -> float:
    """Milliseconds of a batch."""
    start = time.perf_counter()
    for _ in range(OPERATORS):
        torch.add(x, 1)
    return (time.perf_counter() - start) * 1e3


def measure(rounds: int, seconds: float) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    own_core, other_core = two_cores()
    os.sched_setaffinity(0, {other_core})  # and so of all threads and processes from now on
    x = torch.ones(8)
    pipe, other = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=other_rank, args=(other,))
    peer.start()
    with rank_of("own", 1) as own:
        collect_rarely()  # as a rank
        beside = Beside(Rank(own, pipe), pipe, seconds)
        variants: dict[str, Callable[[], AbstractContextManager[float]]] = {
            "alone": beside.alone,
            "layers pending": beside.pending,
            f"frames leaving at {_shown(USUAL)}": partial(beside.leaving, USUAL),
            f"frames arriving at {_shown(USUAL)}": partial(beside.arriving, USUAL),
        }
        goals = dict.fromkeys(list(variants)[1:], "<=1.1")
        variants |= {
            f"frames leaving at {_shown(FAST)}": partial(beside.leaving, FAST),
            f"frames arriving at {_shown(FAST)}": partial(beside.arriving, FAST),
            "a turn every millisecond": beside.polling,
        }
        batches: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, variant in variants.items():
                with variant() as end:
                    os.sched_setaffinity(0, {own_core})  # of this thread
                    batches[name].append(mean_batch(x, end))
                    os.sched_setaffinity(0, {other_core})
    other.close()
    pipe.close()
    peer.join()
    medians = {name: statistics.median(each) for name, each in batches.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(each, batches["alone"], strict=True))
        for name, each in batches.items()
    }
    return [
        {
            "metric": f"{OPERATORS} operators, {name}",
            "value": ratios[name] if name in goals else value,
            "unit": "x" if name in goals else "ms",
            "goal": goals.get(name, ""),
            "against": "alone",
            "ratio": ratios[name],
        }
        for name, value in medians.items()
    ]


def _shown(rate: float) -> str:
    return f"{rate / 1e9:g} GB/s"


def mean_batch(x: torch.Tensor, end: float) -> float:
    """Milliseconds of the batches until ``end``, since a frame does not come in each."""
    times = []
    while time.monotonic() < end:
        times.append(launch(x))
    return statistics.mean(times)


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=15)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each variant in a round")
    options = parser.parse_args()
    rows = measure(options.rounds, options.seconds)
    publish("node/plane_beside_launches", rows, dry=options.dry)


if __name__ == "__main__":
    main()
