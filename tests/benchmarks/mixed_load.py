"""Long prompts arriving among running streams: prefill and decode apart against together.

    python -m tandem.tests.benchmarks.mixed_load

Eight streams generate while fresh 2,000-token prompts arrive at fixed times, whether or not earlier
ones are done, such that the prefill node is busy half of the time. Both sides have the same two
cores, see the same prompts at the same times, and take turns, several rounds of them:

- disaggregated: a prefill node on one core and a decode node on the other, one thread each;
- aggregated: one node on both cores, two threads, chunked prefill with the default budget.

Each side has a router of its own. Routers and load generator may use both cores, so they take time
from the nodes of either side, as they would in service. The side that is not measured is idle.

Both kinds of ``--cpu-kernels`` are measured. The mean inter-token latency has a bound that no
server can pass: the aggregated one stops its streams only while it prefills, about 0.28 of the time
here, so the ratio is 0.72 times what a decode step takes on one core over what it takes on two. The
better a step uses the second core, the worse the ratio. So it is with the longest latencies: the
faster a chunk of a prompt is computed, the shorter it stops the aggregated server's streams.

Threads that wait for each other suffer more from a busy neighbour than threads that do not, so a
noisy machine favours the disaggregated side. Rounds in which others took more than a twentieth of
the cores are therefore measured again, and the quietest ones count; what others took is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .neighbours import Neighbours
from .random_model import QWEN3_42M, write_random_model
from .report import write
from .sides import APART, START_SECONDS, TOGETHER, pinned, serving
from .streaming import Received, complete

STREAMS = 8
STREAM_PROMPT, STREAM_TOKENS = 64, 8000
LONG_PROMPT, LONG_TOKENS = 2000, 16
SETTLE_SECONDS = 2.0
CALIBRATIONS = 3
FINISH_SECONDS = 60.0
QUIET_SHARE = 0.05
# Of --cpu-kernels.
NAMES = {"compiled": "compiled kernels", "torch": "torch's operators"}


@dataclass(frozen=True, slots=True)
class Window:
    """What one side did with one round's load."""

    gaps: list[float]  # between tokens of the streams, seconds
    first_tokens: list[float]  # of the long prompts, seconds
    output_rate: float  # tokens that reached clients, a second
    total_rate: float  # the same and the prompts' tokens
    remote_tokens: int
    others: float  # share of the cores that other processes took

    @property
    def mean_gap(self) -> float:
        return statistics.fmean(self.gaps)

    @property
    def p99_gap(self) -> float:
        return statistics.quantiles(self.gaps, n=100)[98]

    @property
    def first_token(self) -> float:
        return statistics.median(self.first_tokens)


@dataclass(frozen=True, slots=True)
class Pair:
    """One round: the same load on either side."""

    apart: Window
    together: Window

    @property
    def others(self) -> float:
        return max(self.apart.others, self.together.others)


# ---- the load ----------------------------------------------------------------------------------


def prompt(seed: str, tokens: int) -> list[int]:
    """Fresh for each seed, the same on both sides."""
    return random.Random(seed).choices(range(QWEN3_42M.vocab), k=tokens)


async def measure(port: int, name: str, arrivals: Sequence[float], seconds: float) -> Window:
    """One round on one side. ``arrivals`` are seconds from the window's begin."""
    async with _streams(port, name) as streams:
        neighbours, begun = Neighbours(sorted(os.sched_getaffinity(0))), time.monotonic()
        async with asyncio.timeout(seconds + FINISH_SECONDS), asyncio.TaskGroup() as group:
            longs = [
                group.create_task(_arrive(port, prompt(f"{name}/{i}", LONG_PROMPT), begun + at))
                for i, at in enumerate(arrivals)
            ]
            group.create_task(asyncio.sleep(seconds))
        # The streams went on until the last long prompt had its answer.
        others = neighbours.share()
    return _window(streams, [task.result() for task in longs], begun, begun + seconds, others)


async def calibrate(port: int) -> float:
    """Seconds from a long prompt to its first token beside running streams, one at a time."""
    async with _streams(port, "calibrate"):
        alone = [
            await complete(port, prompt(f"calibrate/{i}", LONG_PROMPT), 1)
            for i in range(CALIBRATIONS)
        ]
    return statistics.median(received.first_token_seconds for received in alone)


@asynccontextmanager
async def _streams(port: int, name: str) -> AsyncIterator[list[Received]]:
    """Streams that have all begun, and are cut at the end."""
    received = [Received(time.monotonic()) for _ in range(STREAMS)]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                complete(port, prompt(f"{name}/stream {i}", STREAM_PROMPT), STREAM_TOKENS, one)
            )
            for i, one in enumerate(received)
        ]
        async with asyncio.timeout(START_SECONDS):
            while not all(one.times for one in received):  # noqa: ASYNC110 - one waiter
                await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLE_SECONDS)
        yield received
        for task in tasks:
            if task.done():
                raise RuntimeError(f"a stream of {STREAM_TOKENS} tokens ended within the round")
            task.cancel()


async def _arrive(port: int, tokens: list[int], at: float) -> Received:
    await asyncio.sleep(at - time.monotonic())
    return await complete(port, tokens, LONG_TOKENS)


def _window(
    streams: list[Received], longs: list[Received], begun: float, end: float, others: float
) -> Window:
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in pairwise(stream.times)
        if begun <= later < end
    ]
    output = sum(begun <= at < end for one in (*streams, *longs) for at in one.times)
    prompts = sum(begun <= one.times[0] < end for one in longs) * LONG_PROMPT
    return Window(
        gaps=gaps,
        first_tokens=[one.first_token_seconds for one in longs],
        output_rate=output / (end - begun),
        total_rate=(output + prompts) / (end - begun),
        remote_tokens=sum(one.remote_tokens for one in longs),
        others=others,
    )


# ---- the comparison ----------------------------------------------------------------------------


def run(kernels: str, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Start both sides, let them take turns, and give the rows of the report."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("this benchmark needs two cores")
    with tempfile.TemporaryDirectory() as folder, pinned(cores):
        model, logs = Path(folder, "model"), Path(folder, "logs")
        flag = f"--cpu-kernels={kernels}"
        parameters = write_random_model(model, QWEN3_42M)
        with (
            serving(APART, cores, model, logs / APART.name, flag) as apart,
            serving(TOGETHER, cores, model, logs / TOGETHER.name, flag) as together,
        ):
            interval = 2 * asyncio.run(calibrate(apart))
            asyncio.run(calibrate(together))  # warms it as much
            # The last comes early enough to be answered within the window.
            arrivals = [interval * i for i in range(int(seconds / interval))]
            if not arrivals:
                raise SystemExit(f"a prompt every {interval:.1f} s; give more --seconds than that")
            pairs = _take_turns(apart, together, arrivals, seconds, rounds)
    load = (
        f"{parameters / 1e6:.0f} M parameters in fp32, {NAMES[kernels]}, "
        f"a prompt every {interval:.2f} s"
    )
    return _rows(pairs, load, len(arrivals))


def _take_turns(
    apart: int, together: int, arrivals: Sequence[float], seconds: float, rounds: int
) -> list[Pair]:
    """The quietest ``rounds`` of at most twice as many."""
    pairs: list[Pair] = []
    for number in range(2 * rounds):
        pair = Pair(
            *(
                asyncio.run(measure(port, f"round {number}", arrivals, seconds))
                for port in (apart, together)
            )
        )
        pairs.append(pair)
        print(f"round {number}\n  {_summary(pair.apart)}\n  {_summary(pair.together)}", flush=True)
        if sum(pair.others <= QUIET_SHARE for pair in pairs) == rounds:
            break
    return sorted(pairs, key=lambda pair: pair.others)[:rounds]


# Metric, unit, scale, figure of a window, goal of the ratio.
FIGURES: tuple[tuple[str, str, float, Callable[[Window], float], str], ...] = (
    ("mean ITL of the streams", "ms", 1e3, lambda w: w.mean_gap, "<=0.75"),
    ("p99 ITL of the streams", "ms", 1e3, lambda w: w.p99_gap, "<=0.2"),
    ("longest gap of the streams", "ms", 1e3, lambda w: max(w.gaps), ""),
    ("TTFT of the long prompts, median", "ms", 1e3, lambda w: w.first_token, ""),
    ("throughput, prompt and output tokens", "tok/s", 1, lambda w: w.total_rate, ">=0.95"),
    ("throughput, output tokens", "tok/s", 1, lambda w: w.output_rate, ">=0.95"),
)


def _rows(pairs: list[Pair], load: str, prompts: int) -> list[dict[str, Any]]:
    """Values are medians over the rounds; ratios are taken within a round, then their median."""
    rows = []
    for metric, unit, scale, figure, goal in FIGURES:
        ours, theirs = (
            [figure(side) * scale for side in sides]
            for sides in ([p.apart for p in pairs], [p.together for p in pairs])
        )
        rows.append(
            {
                "metric": f"mixed load ({load}): {metric}",
                "value": statistics.median(ours),
                "unit": unit,
                "goal": goal,
                "against": f"aggregated on the same cores ({statistics.median(theirs):.4g} {unit})",
                "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
            }
        )
    remote = sum(pair.apart.remote_tokens for pair in pairs)
    wanted = len(pairs) * prompts * (LONG_PROMPT - 1)
    shares = {
        "long prompts' tokens from the prefill node": remote / wanted,
        "cores' time that others took, worst round": max(pair.others for pair in pairs),
    }
    return rows + [
        {"metric": f"mixed load ({load}): share of the {name}", "value": share, "unit": "1"}
        for name, share in shares.items()
    ]


def _summary(window: Window) -> str:
    figures = (
        f"{name} {figure(window) * scale:.4g} {unit}" for name, unit, scale, figure, _ in FIGURES
    )
    return f"{', '.join(figures)}, others {window.others:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of a side in a round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for kernels in NAMES:
        print(NAMES[kernels], flush=True)
        rows += run(kernels, options.seconds, options.rounds)
    print(write("mixed_load", rows).read_text())


if __name__ == "__main__":
    main()
