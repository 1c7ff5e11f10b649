"""Prompts arriving among running streams: disaggregated against aggregated serving.

    python -m tandem.benchmarks.mixed_load

Eight streams generate while fresh prompts arrive at fixed times, whether or not earlier ones are
done. All sides have the same two cores, see the same prompts at the same times, and take turns,
several rounds of them:

- disaggregated: a prefill node on one core and a decode node on the other, one thread each;
- aggregated: one node on both cores, two threads, prompts in chunks of the full token budget;
- aggregated, chunks cut by time: the same with the default ``--itl-target``;
- aggregated replicas: two nodes of one thread, each on a core of its own, behind one router.

Each side has its own router. Routers and load generator may use both cores, so they compete with
the nodes on every side, as they would in production. Sides that are not measured are idle.

The expected gain of disaggregation depends on the load, and so do the goals. With long prompts near
saturation of the prefill node it should win: clearly in tail latency, and in mean latency where
prompts dominate. At low load its cost must be small. With short prompts it should lose, since the
prefill core is nearly idle while one core does all decoding; that load has no goals and only shows
the cost.

The gain in mean inter-token latency is bounded: the aggregated server stops its streams only while
it prefills, so the ratio is at best the share of time in which it does not prefill, times the ratio
of a decode step's time on one core to that on two.

Threads that synchronise suffer more from a busy neighbour, so a noisy machine favours the sides
whose nodes have one thread. Rounds in which other processes used more than 5 % of the cores are
therefore repeated and the quietest ones count; the share used by others is reported.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tandem.bench.client.api_server import ApiServer
from tandem.bench.client.measured_response import MeasuredResponse
from tandem.bench.open_loop import send_all
from tandem.bench.running_streams import greedy_body, running
from tandem.benchmarks.support.cores import two_cores
from tandem.benchmarks.support.neighbours import Neighbours
from tandem.benchmarks.support.random_model import QWEN3_42M, write_random_model
from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.benchmarks.support.sides import (
    APART,
    REPLICAS,
    TOGETHER,
    WHOLE_CHUNKS,
    pinned,
    serving,
)
from tandem.benchmarks.support.streaming import complete, connected

STREAMS = 8
STREAM_PROMPT, STREAM_TOKENS = 64, 8000
RESPONSE_TOKENS = 16
SETTLE_SECONDS = 2.0
CALIBRATIONS = 3
FINISH_SECONDS = 60.0
QUIET_SHARE = 0.05


# Sides to compare the pair with; goals apply to the first.
AGGREGATED = (WHOLE_CHUNKS, TOGETHER, REPLICAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLoad:
    """Prompts of one length at a rate that keeps the prefill node ``busy`` for that share of the
    time, and the goals for the ratios by metric."""

    name: str
    prompt: int
    busy: float
    goals: Mapping[str, str]


MEAN, P99 = "mean ITL of the streams", "p99 ITL of the streams"
FIRST, THROUGHPUT = "TTFT of the prompts, median", "throughput, prompt and output tokens"
LOADS = (
    MixedLoad(
        name="prompts of 4,000 tokens near saturation",
        prompt=4000,
        busy=0.85,
        goals={MEAN: "<=0.85", P99: "<=0.2", FIRST: "<=2.7", THROUGHPUT: ">=0.98"},
    ),
    MixedLoad(
        name="prompts of 2,000 tokens near saturation",
        prompt=2000,
        busy=0.85,
        goals={MEAN: "<=1.1", P99: "<=0.286", FIRST: "<=2.7", THROUGHPUT: ">=0.98"},
    ),
    MixedLoad(
        name="prompts of 2,000 tokens at low load",
        prompt=2000,
        busy=0.2,
        goals={MEAN: "<=1.1", FIRST: "<=1.3", THROUGHPUT: ">=0.98"},
    ),
    MixedLoad(name="short prompts, where a pair should lose", prompt=64, busy=0.2, goals={}),
)


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """Results of one side in one round."""

    gaps: list[float]  # between tokens of the streams, seconds
    first_tokens: list[float]  # of the long prompts, seconds
    output_rate: float  # tokens that reached clients, a second
    total_rate: float  # output and prompt tokens
    remote_tokens: int
    others: float  # share of the cores used by other processes

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
class LoadRound:
    """The same load on each side."""

    windows: Mapping[str, LoadWindow]  # by the side's name

    @property
    def apart(self) -> LoadWindow:
        return self.windows[APART.name]

    @property
    def others(self) -> float:
        return max(window.others for window in self.windows.values())


# ---- the load ----------------------------------------------------------------------------------


def prompt(seed: str, tokens: int) -> list[int]:
    """The prompt of a seed: new for each seed, the same on all sides."""
    return random.Random(seed).choices(range(QWEN3_42M.vocab), k=tokens)


async def measure(
    port: int, name: str, load: MixedLoad, arrivals: Sequence[float], seconds: float
) -> LoadWindow:
    """Measure one round on one side. ``arrivals`` are in seconds from the start of the window."""
    prompts = [prompt(f"{name}/{i}", load.prompt) for i in range(len(arrivals))]
    with connected(port) as server:

        async def send(index: int, response: MeasuredResponse) -> None:
            await complete(server, prompts[index], RESPONSE_TOKENS, response)

        async with _streams(server, name) as streams:
            neighbours, start = Neighbours(sorted(os.sched_getaffinity(0))), time.perf_counter()
            async with asyncio.timeout(seconds + FINISH_SECONDS):
                responses, _ = await asyncio.gather(
                    send_all(arrivals, send), asyncio.sleep(seconds)
                )
            # The streams ran until the last prompt had its response.
            others = neighbours.share()
    return _window(streams, responses, load.prompt, start, start + seconds, others)


async def calibrate(port: int, load: MixedLoad) -> float:
    """Seconds from a prompt to its first token beside running streams, one at a time."""
    name = f"calibrate {load.name}"
    with connected(port) as server:
        async with _streams(server, name):
            alone = [
                await complete(server, prompt(f"{name}/{i}", load.prompt), 1)
                for i in range(CALIBRATIONS)
            ]
    return statistics.median(response.ttft for response in alone)


@asynccontextmanager
async def _streams(server: ApiServer, name: str) -> AsyncIterator[list[MeasuredResponse]]:
    """Streams that have all started when the block begins, and are cancelled at its end."""
    prompts = [prompt(f"{name}/stream {i}", STREAM_PROMPT) for i in range(STREAMS)]
    bodies = [greedy_body(server, each, STREAM_TOKENS) for each in prompts]
    async with running(server, bodies, warm_tokens=1, remedy="raise STREAM_TOKENS") as streams:
        await asyncio.sleep(SETTLE_SECONDS)
        yield streams.responses


def _window(
    streams: list[MeasuredResponse],
    responses: list[MeasuredResponse],
    prompt_tokens: int,
    start: float,
    end: float,
    others: float,
) -> LoadWindow:
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in pairwise(stream.times)
        if start <= later < end
    ]
    output = sum(start <= at < end for one in (*streams, *responses) for at in one.times)
    prompts = sum(start <= one.times[0] < end for one in responses) * prompt_tokens
    return LoadWindow(
        gaps=gaps,
        first_tokens=[one.ttft for one in responses],
        output_rate=output / (end - start),
        total_rate=(output + prompts) / (end - start),
        remote_tokens=sum(one.remote_tokens for one in responses),
        others=others,
    )


# ---- the comparison ----------------------------------------------------------------------------


def run(kernels: str, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Start all sides, let them take turns under each load, and give the rows of the report."""
    cores = two_cores()
    rows = []
    with tempfile.TemporaryDirectory() as folder, pinned(cores), ExitStack() as stack:
        model, logs = Path(folder, "model"), Path(folder, "logs")
        parameters = write_random_model(model, QWEN3_42M)
        ports = {
            side.name: stack.enter_context(
                serving(side, cores, model, logs / side.name, f"--cpu-kernels={kernels}")
            )
            for side in (APART, *AGGREGATED)
        }
        for load in LOADS:
            # Every side is calibrated, to warm all equally; only the first one's result is used.
            alone, *_ = [asyncio.run(calibrate(port, load)) for port in ports.values()]
            interval = alone / load.busy
            # The last one is early enough to finish within the window.
            arrivals = [interval * i for i in range(int(seconds / interval))]
            if not arrivals:
                raise SystemExit(f"a prompt every {interval:.1f} s; give more --seconds than that")
            about = f"{load.name}, one every {interval:.2f} s, {parameters / 1e6:.0f} M parameters"
            print(about, flush=True)
            done = _take_turns(ports, load, arrivals, seconds, rounds)
            rows += _rows(done, load, about, len(arrivals))
    return rows


def _take_turns(
    ports: Mapping[str, int],
    load: MixedLoad,
    arrivals: Sequence[float],
    seconds: float,
    rounds: int,
) -> list[LoadRound]:
    """Return the quietest ``rounds`` of at most twice as many."""
    done: list[LoadRound] = []
    for number in range(2 * rounds):
        name = f"{load.name}/{number}"
        windows = {
            side: asyncio.run(measure(port, name, load, arrivals, seconds))
            for side, port in ports.items()
        }
        done.append(LoadRound(windows))
        for side, window in windows.items():
            print(f"  {side}: {_summary(window)}", flush=True)
        if sum(one.others <= QUIET_SHARE for one in done) == rounds:
            break
    return sorted(done, key=lambda one: one.others)[:rounds]


# Metric, unit, scale, figure of a window.
FIGURES: tuple[tuple[str, str, float, Callable[[LoadWindow], float]], ...] = (
    (MEAN, "ms", 1e3, lambda w: w.mean_gap),
    (P99, "ms", 1e3, lambda w: w.p99_gap),
    ("longest gap of the streams", "ms", 1e3, lambda w: max(w.gaps)),
    (FIRST, "ms", 1e3, lambda w: w.first_token),
    (THROUGHPUT, "tok/s", 1, lambda w: w.total_rate),
    ("throughput, output tokens", "tok/s", 1, lambda w: w.output_rate),
)


def _rows(done: list[LoadRound], load: MixedLoad, about: str, prompts: int) -> list[dict[str, Any]]:
    """Rows of the report: median values over the rounds, and medians of the ratios within a
    round."""
    rows = []
    for metric, unit, scale, figure in FIGURES:
        ours = [figure(one.apart) * scale for one in done]
        for side in AGGREGATED:
            theirs = [figure(one.windows[side.name]) * scale for one in done]
            rows.append(
                {
                    "metric": f"mixed load ({about}): {metric}",
                    "value": statistics.median(ours),
                    "unit": unit,
                    "goal": load.goals.get(metric, "") if side is WHOLE_CHUNKS else "",
                    "against": f"{side.name} ({statistics.median(theirs):.4g} {unit})",
                    "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
                }
            )
    expected = len(done) * prompts * (load.prompt - 1)
    shares = {
        "prompts' tokens from the prefill node": sum(r.apart.remote_tokens for r in done)
        / expected,
        "cores' time that others took, worst round": max(one.others for one in done),
    }
    return rows + [
        {"metric": f"mixed load ({about}): share of the {name}", "value": share, "unit": "1"}
        for name, share in shares.items()
    ]


def _summary(window: LoadWindow) -> str:
    figures = (
        f"{name} {figure(window) * scale:.4g} {unit}" for name, unit, scale, figure in FIGURES
    )
    return f"{', '.join(figures)}, others {window.others:.2f}"


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a side in a round")
    parser.add_argument("--cpu-kernels", choices=("compiled", "torch"), default="compiled")
    options = parser.parse_args()
    rows = run(options.cpu_kernels, options.seconds, options.rounds)
    publish("mixed_load", rows, dry=options.dry)


if __name__ == "__main__":
    main()
