"""A decode node's served token rate relative to its engine's: ``python -m ...node.served_rate``.

64 streams of the built-in model, whose short steps make the overhead outside computation large. The
engine's rate is measured in a process that discards the tokens. In the served case the decode node
has the same core to itself; the router and the clients have another. The two alternate, and the
ratio is the median of the ratios of the rounds. The CPU time of the node's processes is compared
too, because it varies less on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tandem import Engine, EngineConfig, SamplingParams
from tandem.benchmarks.support.cores import two_cores
from tandem.benchmarks.support.report import load_parser, publish
from tandem.benchmarks.support.router_tokens_load import Pace, read_all, request_of
from tandem.benchmarks.support.sides import Side, pinned, serving
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.engine.core import EngineCore
from tandem.shared.engine.request import build_sequences
from tandem.shared.engine.sequence import StepOutput

NODE = Side("a decode node", (("decode-node", (1,), ("--threads=1",)),))
PROMPT, CONTEXT = 16, 1024
THIS = "tandem.benchmarks.node.served_rate"


class Cost(NamedTuple):
    """Elapsed and CPU seconds of one round."""

    seconds: float
    cpu_seconds: float


def prompts(streams: int, number: int) -> list[list[int]]:
    """Prompts not used in any earlier round."""
    return [[3 + stream, 3 + number, *range(3, PROMPT + 1)] for stream in range(streams)]


def cost(process: psutil.Process, work: Callable[[], None]) -> Cost:
    """Elapsed time of ``work``, and the CPU time of a process and its children meanwhile."""
    family = [process, *process.children(recursive=True)]

    def cpu() -> float:
        return sum(sum(each.cpu_times()[:2]) for each in family)

    start, before = time.monotonic(), cpu()
    work()
    return Cost(time.monotonic() - start, cpu() - before)


async def computed(core: EngineCore, options: argparse.Namespace, number: int) -> None:
    """Generate all tokens of all streams and discard them."""
    end = asyncio.get_running_loop().create_future()
    remaining = options.streams

    def listen(output: StepOutput) -> None:
        nonlocal remaining
        remaining -= output.finish_reason is not None
        if not remaining:
            end.set_result(None)

    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    for prompt in prompts(options.streams, number):
        (sequence,) = build_sequences(core, prompt, params, eos_token_ids=(), vocab_size=2048)
        core.submit(sequence, listen)
    await end


def run_engine(options: argparse.Namespace) -> None:
    """Entry point of the engine process: runs one round for each line of standard input."""
    config = EngineConfig(
        model="builtin", threads=1, max_num_seqs=options.streams, max_model_len=CONTEXT
    )
    with Engine(config) as engine:
        assert engine._thread is not None
        core = engine._thread.runner.engine.core
        print("ready", flush=True)
        for line in sys.stdin:
            work = computed(core, options, int(line))
            engine._thread.submit(work).result()
            print("computed", flush=True)


@contextmanager
def engine_alone(options: argparse.Namespace, cores: list[int]) -> Iterator[Callable[[int], Cost]]:
    """Yield a function that runs one round of the engine alone."""
    counts = [f"--streams={options.streams}", f"--tokens={options.tokens}"]
    with pinned(cores[1:]):
        process = subprocess.Popen(
            [sys.executable, "-m", THIS, "--engine", *counts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    assert process.stdin is not None and process.stdout is not None
    commands, results = process.stdin, process.stdout

    def run(number: int) -> None:
        commands.write(f"{number}\n")
        commands.flush()
        results.readline()

    try:
        assert results.readline() == "ready\n"
        yield lambda number: cost(psutil.Process(process.pid), lambda: run(number))
    finally:
        process.terminate()
        process.communicate()


def served(port: int, options: argparse.Namespace, number: int) -> None:
    """One round of streaming clients through the router."""
    fields = {"max_tokens": options.tokens, "temperature": 0, "ignore_eos": True}
    requests = [
        request_of("/v1/completions", prompt=prompt, **fields)
        for prompt in prompts(options.streams, number)
    ]

    async def run() -> None:
        await read_all(port, requests, Pace(1))

    asyncio.run(run())


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The report's rows."""
    cores = two_cores()
    alone: list[Cost] = []
    over_http: list[Cost] = []
    flags = (f"--max-num-seqs={options.streams}", f"--max-model-len={CONTEXT}")
    with (
        tempfile.TemporaryDirectory() as folder,
        engine_alone(options, cores) as engine,
        pinned(cores[:1]),
        serving(NODE, cores, builtin_model_path(), Path(folder), *flags) as port,
    ):
        children = psutil.Process().children()
        (node,) = (each for each in children if "decode-node" in each.cmdline())
        engine(0)
        served(port, options, 0)
        for number in range(1, options.rounds + 1):
            alone.append(engine(number))
            over_http.append(cost(node, lambda number=number: served(port, options, number)))  # type: ignore[misc]
    return rows(options, alone, over_http)


def rows(
    options: argparse.Namespace, alone: list[Cost], over_http: list[Cost]
) -> list[dict[str, Any]]:
    streams = f"{options.streams} streams of the built-in model"
    tokens = options.streams * options.tokens
    pairs = list(zip(alone, over_http, strict=True))
    own = tokens / statistics.median(each.seconds for each in alone)
    own_cpu = 1e6 / tokens * statistics.median(each.cpu_seconds for each in alone)
    return [
        {
            "metric": f"{streams}, served over HTTP",
            "value": tokens / statistics.median(each.seconds for each in over_http),
            "unit": "tokens/s",
            "goal": ">=0.95",
            "against": f"the node's engine alone ({own:.0f} tokens/s)",
            "ratio": statistics.median(one.seconds / other.seconds for one, other in pairs),
        },
        {
            "metric": f"{streams}, served over HTTP: CPU time of the node",
            "value": 1e6 / tokens * statistics.median(each.cpu_seconds for each in over_http),
            "unit": "us/token",
            "goal": "<=1.05",
            "against": f"its engine alone ({own_cpu:.1f} us)",
            "ratio": statistics.median(other.cpu_seconds / one.cpu_seconds for one, other in pairs),
        },
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse ``arguments``, by default the command line's."""
    parser = load_parser(__doc__, streams=64, tokens=500, rounds=7)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.engine:
        run_engine(options)
        return
    publish("node/served_rate", measure(options), dry=options.dry)


if __name__ == "__main__":
    main()
