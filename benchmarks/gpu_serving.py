"""What clients see of nodes on one GPU, with random weights.

    python -m tandem.benchmarks.gpu_serving [--out DIR] [--device emulation]

First the HTTP path: a decode node with Qwen3-0.6B and 256 streams. Then a prefill node and a decode
node with Llama-3-8B: how long a prompt's KV is still on its way once the prompt is computed, how
the time between a stream's tokens changes while KV arrives (of prompts that the prefill node has
cached, so that it hardly computes), and what a stream keeps of its speed beside a long prompt,
which is computed on the same GPU.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tandem.bench.client.api_server import ApiServer
from tandem.bench.client.measured_response import MeasuredResponse
from tandem.bench.datasets.random_prompts import IdPrompts
from tandem.bench.interference import Scene, attack
from tandem.bench.running_streams import greedy_body, running
from tandem.benchmarks.node.gpu_engine import SHAPES, GpuShape, write_shape
from tandem.benchmarks.support.gpu_figures import Figure, figure, parser, run
from tandem.benchmarks.support.gpu_predictions import (
    BETWEEN,
    EXPOSED,
    HTTP,
    LLAMA,
    MOVED,
    QWEN,
    VICTIM_GAP,
    VICTIM_SPEED,
)
from tandem.benchmarks.support.router_log import RouterLog
from tandem.benchmarks.support.router_tokens_load import Pace, read_all, request_of
from tandem.benchmarks.support.sides import Side, serving
from tandem.benchmarks.support.streaming import complete, connected

EMULATED = "emulation" in sys.argv
CONTEXT = 8192


@dataclass(frozen=True)
class ServingLoad:
    """Streams over HTTP and their tokens; prompts that are handed over and their tokens; a stream
    and a prompt that disturbs it."""

    streams: int
    stream_tokens: int
    prompts: int
    prompt_tokens: int
    settle_seconds: float
    scene: Scene
    flags: tuple[str, ...]


ON_GPU = ServingLoad(
    *(256, 256, 8, 2048, 1.5),
    Scene(prompt_tokens=4000, victim_tokens=CONTEXT - 200, alone_seconds=1.5),
    ("--device=cuda",),
)
SMALL = ServingLoad(
    *(4, 8, 2, 100, 0.2),
    Scene(prompt_tokens=100, victim_tokens=2000, alone_seconds=0.2),
    ("--device=cpu", "--threads=1"),
)


@contextmanager
def served(shape: GpuShape, kinds: Sequence[str], *flags: str) -> Iterator[tuple[int, RouterLog]]:
    """Nodes of these kinds; the router's port, and its log."""
    cores = sorted(os.sched_getaffinity(0))
    everywhere = tuple(range(len(cores)))
    # Only the prefill node keeps KV, and it computes all but short prompts.
    forgetful = ("--no-enable-prefix-caching", "--prefill-threshold=64")
    of_kind = {"prefill-node": (), "decode-node": forgetful}
    side = Side("on one GPU", tuple((kind, everywhere, of_kind[kind]) for kind in kinds))
    with tempfile.TemporaryDirectory() as root:
        model, logs = write_shape(shape, Path(root, "model")), Path(root, "logs")
        common = ("--load-format=dummy", f"--max-model-len={CONTEXT}", *flags)
        try:
            with serving(side, cores, model, logs, *common) as port:
                yield port, RouterLog(logs / "router.log")
        except BaseException:
            for log in sorted(logs.glob("*.log")):  # the folder goes with the block
                print(f"-- {log.name}\n{log.read_text()[-1500:]}", flush=True)
            raise


# ---- the HTTP path -----------------------------------------------------------------------------


def http_rate(load: ServingLoad, shape: GpuShape) -> Iterator[Figure]:
    """Tokens a second of all streams together."""
    vocabulary = shape.config["vocab_size"]
    fields = {"max_tokens": load.stream_tokens, "temperature": 0, "ignore_eos": True}

    def seconds(port: int, count: int) -> float:
        prompts = [random.choices(range(vocabulary), k=16) for _ in range(count)]
        requests = [request_of("/v1/completions", prompt=each, **fields) for each in prompts]

        async def read() -> None:
            await read_all(port, requests, Pace(1))

        start = time.perf_counter()
        asyncio.run(read())
        return time.perf_counter() - start

    flags = (*load.flags, f"--max-num-seqs={load.streams}", "--num-gpu-blocks-override=16384")
    with served(shape, ("decode-node",), *flags) as (port, _):
        seconds(port, load.streams)
        tokens = load.streams * load.stream_tokens
        yield figure(HTTP, tokens / seconds(port, load.streams), "tok/s")


# ---- the handoff -------------------------------------------------------------------------------


def pair_figures(load: ServingLoad, shape: GpuShape) -> Iterator[Figure]:
    """A prefill node and a decode node on one GPU."""
    flags = (
        *(*load.flags, "--nodes-per-device=2"),
        *("--num-gpu-blocks-override=2048", "--max-num-seqs=32"),
    )
    kinds = ("prefill-node", "decode-node")
    with (
        served(shape, kinds, *flags) as (port, log),
        asyncio.Runner() as loop,
        connected(port) as server,
    ):
        exposed, moving = loop.run(handed_over(server, log, load, shape))
        yield figure(EXPOSED, 1e3 * exposed, "ms")
        yield figure(MOVED, load.prompt_tokens * shape.kv_bytes / moving / 1e9, "GB/s")
        before, during = loop.run(between_tokens(server, load, shape))
        yield figure(BETWEEN, percentile(during) / percentile(before), "x")
        prompts = IdPrompts(range(1, min(30_000, shape.config["vocab_size"])))
        done = loop.run(attack(server, prompts, "gpu", load.scene))
        yield figure(VICTIM_SPEED, done.worst_share, "")
        yield figure(VICTIM_GAP, 1e3 * done.longest_gap, "ms")


def prompts_of(load: ServingLoad, shape: GpuShape) -> list[list[int]]:
    """Prompts without a common beginning; the first warms both nodes."""
    drawn, vocabulary = random.Random(0), range(shape.config["vocab_size"])
    return [drawn.choices(vocabulary, k=load.prompt_tokens) for _ in range(load.prompts + 1)]


async def handed_over(
    server: ApiServer, log: RouterLog, load: ServingLoad, shape: GpuShape
) -> tuple[float, float]:
    """Medians in seconds: from a computed prompt to its last KV, and all of a transfer from the
    prefill node's cache, with the step of its last token."""
    exposed, moving = [], []
    for prompt in prompts_of(load, shape):
        await complete(server, prompt, 4)
        exposed.append((await asyncio.to_thread(log.next)).get("transfer", 0.0))
        await complete(server, prompt, 1)
        phases = await asyncio.to_thread(log.next)
        moving.append(phases.get("prefill", 0.0) + phases.get("transfer", 0.0))
    return statistics.median(exposed[1:]), max(1e-9, statistics.median(moving[1:]))


async def between_tokens(
    server: ApiServer, load: ServingLoad, shape: GpuShape
) -> tuple[list[float], list[float]]:
    """Seconds between a stream's tokens, before and while KV arrives."""
    prompts = prompts_of(load, shape)
    for prompt in prompts:
        await complete(server, prompt, 1)
    body = greedy_body(server, list(range(1, 17)), load.scene.victim_tokens)
    async with running(server, [body], warm_tokens=20, remedy="send fewer prompts") as streams:
        stream = streams.responses[0]
        begin = time.perf_counter()
        await asyncio.sleep(load.settle_seconds)
        middle = time.perf_counter()
        for prompt in prompts:
            await complete(server, prompt, 1)
        end = time.perf_counter()
    return gaps(stream, begin, middle), gaps(stream, middle, end)


def gaps(stream: MeasuredResponse, begin: float, end: float) -> list[float]:
    return [later - earlier for earlier, later in pairwise(stream.times) if begin <= later < end]


def percentile(values: list[float]) -> float:
    """The 99th."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def measure(load: ServingLoad, small: Callable[[GpuShape], GpuShape]) -> Iterator[Figure]:
    """All figures."""
    yield from http_rate(load, small(SHAPES[QWEN]))
    yield from pair_figures(load, small(SHAPES[LLAMA]))


def main() -> int:
    options = parser("gpu_serving", __doc__).parse_args()
    if EMULATED:
        return run("gpu_serving", options, measure(SMALL, GpuShape.small))
    return run("gpu_serving", options, measure(ON_GPU, lambda shape: shape))


if __name__ == "__main__":
    sys.exit(main())
