"""The data plane beside a thread that launches small operators, as the engine's does on a GPU.

    python -m tandem.benchmarks.node.plane_beside_launches

A batch is 600 operators, about a decode step's launches. Batches run alone, and beside the plane of
the same process: while the layers of a transfer are announced but not yet computed, while its
frames leave or arrive at 15 GB/s, and for comparison while layers are pending and the plane looks
for them every millisecond. The variants take turns.

The peer is another process, so that only one plane shares Python's lock with the launches. All of
it is what a rank runs beside a GPU, by CUDA IPC and in frames of 16 MiB, but for the GPU: a layer
is computed when a clock says so, a frame is packed or scattered by one operator of the CPU, and its
bytes, which a GPU copies without the lock, stay where they are.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.kernels.row_sums import rows_of
from tandem.shared.handoff.carriers.cuda_ipc import NAME as CUDA_IPC
from tandem.shared.handoff.carriers.device import DEVICE_SLOT_BYTES
from tandem.shared.handoff.plane.computed_layers import ComputedLayers
from tandem.shared.handoff.plane.messages import LayerReady, Received, SendFinished
from tandem.shared.handoff.wire.head_parts import HeadRun
from tandem.shared.kv.copying import Copying
from tandem.tests.shared.handoff.support.fake_driver import FakeDevice, FakeDriver
from tandem.tests.shared.handoff.support.memory_cache import layer_of
from tandem.tests.shared.handoff.support.plane_pair import PlaneRank

OPERATORS = 600
PENDING = "layers pending"
LEAVING, ARRIVING = (f"frames {way} at 15 GB/s" for way in ("leaving", "arriving"))
TURN_SECONDS = 0.001
BYTES_A_SECOND = 15e9
# A layer's KV of a chunk is a frame.
LAYERS, HEADS, HEAD_BYTES, BLOCK = 32, 8, 256, 16
CHUNK = DEVICE_SLOT_BYTES // (2 * HEADS * HEAD_BYTES)
FRAME_SECONDS = DEVICE_SLOT_BYTES / BYTES_A_SECOND
# From the announcement to the first layer.
_LEAD_SECONDS = 0.1
# Share of the frames that must have moved when the last layer is computed.
_ON_TIME = 0.95
_SUMS = bytes(8 * rows_of(DEVICE_SLOT_BYTES))


class NoBytes(FakeDriver):
    """A GPU whose copies take no time of the CPU."""

    def copy(self, into: int, source: int, length: int) -> None:
        pass


class LaunchingCache:
    """A ``CachePort`` that launches an operator for each frame, which another thread waits for."""

    kv_dtype = "bfloat16"
    sums_on_the_way = True
    layout = (layer_of(range(HEADS), HEAD_BYTES),) * LAYERS

    def __init__(self) -> None:
        self._x = torch.ones(8)

    def pack_frame(self, *_: Any) -> Copying:
        torch.add(self._x, 1)
        return Copying(lambda: None, lambda: _SUMS)

    def scatter_frame(self, *_: Any) -> Copying:
        return self.pack_frame()


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
    """A transfer of some chunks, of which a layer is computed every ``FRAME_SECONDS`` from ``at``
    on."""

    number: int
    chunks: int
    at: float = 0.0

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
        self._computed = ComputedLayers(lambda: self._wait, own.plane.submit)
        pipe.send((own.config, own.plane.endpoints))
        config, endpoints = pipe.recv()
        self._peer = SimpleNamespace(config=config, plane=SimpleNamespace(endpoints=endpoints))

    def expect(self, prompt: Prompt) -> None:
        self.own.expect(self._peer, prompt.number, prompt.table, **prompt.part)

    def send(self, prompt: Prompt, wait: Callable[[], Any] | None = None) -> None:
        """Announce all layers. ``wait`` sleeps until they are computed, if not at their times."""
        self.own.open(self._peer, prompt.number, prompt.table, **prompt.part)
        for frame in range(prompt.chunks * LAYERS):
            chunk, layer = divmod(frame, LAYERS)
            self._wait = wait or partial(_sleep_until, prompt.at + frame * FRAME_SECONDS)
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
    """The peer's process, which does what it is told until the pipe is closed."""
    torch.set_num_threads(1)
    with rank_of("other", 2) as own, contextlib.suppress(EOFError):
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
        self._chunks = max(1, round(seconds / FRAME_SECONDS / LAYERS))
        self._number = self._moved = 0

    def _prompt(self, chunks: int) -> Prompt:
        self._number += 1
        return Prompt(self._number, chunks, time.monotonic() + _LEAD_SECONDS)

    def _tell(self, prompt: Prompt, *, sends: bool) -> None:
        self._pipe.send((prompt, sends))
        self._pipe.recv()

    @contextmanager
    def alone(self) -> Iterator[float]:
        yield time.monotonic() + self._seconds

    @contextmanager
    def pending(self) -> Iterator[float]:
        """Layers are announced, and computed at the end."""
        prompt, computed = self._prompt(1), threading.Event()
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
    def leaving(self) -> Iterator[float]:
        """Frames leave at a steady rate."""
        prompt = self._prompt(self._chunks)
        self._tell(prompt, sends=False)
        self._rank.send(prompt)
        with self._steady(prompt) as end:
            yield end
        self._rank.await_end(SendFinished, prompt)
        self._pipe.recv()

    @contextmanager
    def arriving(self) -> Iterator[float]:
        """Frames arrive at a steady rate."""
        prompt = self._prompt(self._chunks)
        self._rank.expect(prompt)
        self._tell(prompt, sends=True)
        with self._steady(prompt) as end:
            yield end
        self._rank.await_end(Received, prompt)
        self._pipe.recv()

    @contextmanager
    def _steady(self, prompt: Prompt) -> Iterator[float]:
        """While layers are computed. Raises ``SystemExit`` if their frames were late."""
        frames = prompt.chunks * LAYERS
        _sleep_until(prompt.at)
        yield prompt.at + frames * FRAME_SECONDS
        stats = self._rank.own.plane.stats()
        moved = stats.frames_sent + stats.frames_received - self._moved
        self._moved += frames
        if moved < _ON_TIME * frames:
            raise SystemExit(f"only {moved} of {frames} frames moved in time")


def launch(x: torch.Tensor) -> float:
    """Milliseconds of a batch."""
    start = time.perf_counter()
    for _ in range(OPERATORS):
        torch.add(x, 1)
    return (time.perf_counter() - start) * 1e3


def measure(rounds: int, seconds: float) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    x = torch.ones(8)
    pipe, other = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=other_rank, args=(other,))
    peer.start()
    with rank_of("own", 1) as own:
        beside = Beside(Rank(own, pipe), pipe, seconds)
        variants = {
            "alone": beside.alone,
            PENDING: beside.pending,
            LEAVING: beside.leaving,
            ARRIVING: beside.arriving,
            "a turn every millisecond": beside.polling,
        }
        batches: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, variant in variants.items():
                with variant() as end:
                    batches[name].append(mean_batch(x, end))
    other.close()
    pipe.close()
    peer.join()
    medians = {name: statistics.median(each) for name, each in batches.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(each, batches["alone"], strict=True))
        for name, each in batches.items()
    }
    goals = dict.fromkeys((PENDING, LEAVING, ARRIVING), "<=1.1")
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
