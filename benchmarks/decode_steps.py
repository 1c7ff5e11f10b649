"""Decode steps of a rank while KV arrives.

    python -m tandem.benchmarks.decode_steps

This process decodes eight sequences repeatedly while its data plane receives transfers from a
second process that computes nothing, so the benchmark measures the cost of incoming KV for
concurrent decode steps. Each process has its own core, so receiving competes with the steps as on a
node with as many threads as cores. Windows alternate:

- nothing arrives;
- 100 MB/s, several times what a prefill node on such a core computes of this model (16 KiB a
  token);
- as fast as the carrier can send; no goal.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from tandem.benchmarks.support.cores import two_cores
from tandem.benchmarks.support.handoff_cache import CELL
from tandem.benchmarks.support.handoff_pair import (
    LAYERS,
    MIB,
    ON_HOST,
    await_event,
    expect,
    open_send,
    plane_of,
)
from tandem.benchmarks.support.random_model import QWEN3_42M, write_random_model
from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.shared.engine.plan import RankSampling, SamplerSpec, SequenceStep, StepPlan
from tandem.shared.handoff.carriers.shared_memory import NAME as SHARED_MEMORY
from tandem.shared.handoff.carriers.tcp import NAME as TCP
from tandem.shared.handoff.carriers.transport import Endpoints
from tandem.shared.handoff.plane.endpoint import DataPlane
from tandem.shared.handoff.plane.messages import Expecting, Received, SendFinished
from tandem.tests.support.layers_ready import layer_ready
from tandem.tests.support.runners import build_runner

ROWS, CONTEXT, BLOCK_SIZE = 8, 256, 16
# Size of a transfer, announced layer by layer as a prefill node does.
BYTES = 16 * MIB
TOKENS = BYTES // LAYERS // CELL
CARRIERS = {TCP: "TCP", SHARED_MEMORY: "shared memory"}
NOTHING, PACED, ALL = "nothing arrives", "100 MB/s arrive", "as much arrives as goes"
RATES = {NOTHING: 0.0, PACED: 100e6, ALL: float("inf")}  # bytes a second
WARM_STEPS = 20
ALLOWED_SECONDS = 1e-3


@dataclass(slots=True)
class StepWindow:
    """Durations of the steps in seconds, and the bytes received meanwhile."""

    steps: list[float] = field(default_factory=list)
    received: int = 0
    seconds: float = 0.0

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.steps, n=100)[98]


# ---- decoding -----------------------------------------------------------------------------


def decoder(folder: Path) -> Callable[[], None]:
    """Return a function that runs one decode step of all sequences, at a fixed context length."""
    blocks = -(-CONTEXT // BLOCK_SIZE)
    runner = build_runner(folder, dtype="float32", block_size=BLOCK_SIZE, num_blocks=ROWS * blocks)
    tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(ROWS)]
    specs = [SamplerSpec(row, RankSampling(temperature=0.0), 1) for row in range(ROWS)]
    prompts = [
        SequenceStep(row, list(range(CONTEXT - 1)), 0, tables[row], False) for row in range(ROWS)
    ]
    runner.execute(StepPlan.of(0, prompts, specs))
    rows = [SequenceStep(row, [row], CONTEXT - 1, tables[row], True) for row in range(ROWS)]
    everybody = list(range(ROWS))

    def step() -> None:
        # Each step uses new sequences, so the context does not grow.
        runner.execute(StepPlan.of(1, rows, specs, everybody))

    for _ in range(WARM_STEPS):
        step()
    return step


# ---- arrivals ------------------------------------------------------------------------------


def send(pipe: Connection, carrier: str, core: int) -> None:
    """Entry point of the sending process: one transfer per (number, rate) received, until
    ``None``."""
    os.sched_setaffinity(0, {core})
    plane, events = plane_of("p", 1, TOKENS, carrier, listen=True, ranks=ON_HOST)
    pipe.send(plane.endpoints)
    while (order := pipe.recv()) is not None:
        number, rate = order
        plane.submit(open_send(number, TOKENS))
        start = time.monotonic()
        for layer in range(LAYERS):
            layer_ready(plane, number, 1, layer, 0, TOKENS, layer + 1)
            due = start + (layer + 1) * BYTES / LAYERS / rate
            time.sleep(max(0.0, due - time.monotonic()))
        await_event(events, SendFinished)
    plane.stop()


class Arrivals:
    """Transfers into this process at an adjustable rate."""

    def __init__(self, carrier: str, core: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=send, args=(theirs, carrier, core), daemon=True)
        self._process.start()
        self._plane: DataPlane
        self._events: Queue[Any]
        self._plane, self._events = plane_of("d", 2, TOKENS, carrier, listen=False, ranks=ON_HOST)
        self._endpoints: Endpoints = self._pipe.recv()
        self._numbers = count()
        self.receive_one(RATES[ALL])  # connects

    def receive_one(self, rate: float) -> None:
        number = next(self._numbers)
        self._plane.submit(expect(number, TOKENS, self._endpoints))
        await_event(self._events, Expecting)
        self._pipe.send((number, rate))
        await_event(self._events, Received)

    def receive(self, rate: float, window: StepWindow, over: threading.Event) -> None:
        """Receive transfers at ``rate`` bytes a second until ``over`` is set."""
        while rate and not over.is_set():
            self.receive_one(rate)
            window.received += BYTES

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join(20)
        self._plane.stop()


def measure(
    step: Callable[[], None], arrivals: Arrivals, rate: float, seconds: float
) -> StepWindow:
    """Measure one window."""
    window, over = StepWindow(), threading.Event()
    receiver = threading.Thread(target=arrivals.receive, args=(rate, window, over))
    start = time.monotonic()
    receiver.start()
    while time.monotonic() < start + seconds:
        started = time.perf_counter()
        step()
        window.steps.append(time.perf_counter() - started)
    over.set()
    receiver.join()
    window.seconds = time.monotonic() - start
    return window


def rows(windows_by_rate: dict[str, list[StepWindow]], about: str) -> list[dict[str, Any]]:
    """Rows of the report. The goal for p99 is 1.1 times the idle p99 or 1 ms more, whichever is
    longer."""
    results = []
    quiet = windows_by_rate[NOTHING]
    for name, windows in windows_by_rate.items():
        pairs = list(zip(windows, quiet, strict=True))
        rate = statistics.median(one.received / one.seconds for one in windows) / 1e6
        against = f"nothing arrives (p99 {1e3 * statistics.median(q.p99 for q in quiet):.2f} ms)"
        row = {
            "metric": f"decode steps ({about}), p99, {name}",
            "value": 1e3 * statistics.median(one.p99 for one in windows),
            "unit": "ms",
        }
        if name != NOTHING:
            row |= {
                "goal": "<=1" if name == PACED else "",
                "against": f"1.1 times, or 1 ms more than, {against}; {rate:.0f} MB/s came",
                "ratio": statistics.median(
                    one.p99 / max(1.1 * q.p99, q.p99 + ALLOWED_SECONDS) for one, q in pairs
                ),
            }
        results.append(row)
    return results


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a window")
    options = parser.parse_args()
    cores = two_cores()
    os.sched_setaffinity(0, {cores[1]})
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_random_model(Path(folder), QWEN3_42M)
        step = decoder(Path(folder))
        for carrier, name in CARRIERS.items():
            arrivals = Arrivals(carrier, cores[0])
            windows_by_rate: dict[str, list[StepWindow]] = {rate: [] for rate in RATES}
            for _ in range(options.rounds):
                for rate, bytes_a_second in RATES.items():
                    windows_by_rate[rate].append(
                        measure(step, arrivals, bytes_a_second, options.seconds)
                    )
            arrivals.stop()
            about = f"{parameters / 1e6:.0f} M parameters, {ROWS} sequences, KV over {name}"
            results += rows(windows_by_rate, about)
    publish("decode_steps", results, dry=options.dry)


if __name__ == "__main__":
    main()
