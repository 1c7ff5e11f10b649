"""A router with two workers against one process: ``python -m ...router.router_workers``.

The node and all clients are one process (``router_tokens_load.py``), which takes a whole core, so
two workers cannot have a core each on a machine of two: the router has the other one, whatever its
processes. What workers could pass on with a core each is the tokens over the CPU time of the
busiest one: it counts that each gets messages of fewer tokens, and how evenly connections are
spread. Each figure is the best of ``--rounds``, in turns, because others use the machine too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tandem.benchmarks.fleet import MeasuredRouter
from tandem.benchmarks.support.cores import two_cores
from tandem.benchmarks.support.report import add_dry, publish
from tandem.benchmarks.support.sides import pinned

LOAD = "tandem.benchmarks.support.router_tokens_load"
RUN_SECONDS = 300.0
GOAL = 1.7


@dataclass(frozen=True, slots=True)
class WorkersRound:
    """What one round passed on. ``workers`` has the CPU seconds of each process that serves HTTP,
    ``keeper`` those of the one that does not, if there is one."""

    tokens: int
    events: int
    workers: tuple[float, ...]
    keeper: float

    @property
    def capacity(self) -> float:
        """Tokens a second if each worker had a core."""
        return self.tokens / max(self.workers)


def one_round(streams: int, tokens: int, workers: int) -> WorkersRound:
    """``tokens`` of each of ``streams``, through a router on one core."""
    cores = two_cores()
    counts = [f"--streams={streams}", f"--tokens={tokens}"]
    with tempfile.TemporaryDirectory() as folder:
        flags = (f"--router-workers={workers}", "--no-access-log")
        with pinned(cores[:1]):
            router = MeasuredRouter(Path(folder) / "router.log", 1, *flags, apart=True)
        try:
            whole = psutil.Process(router.process.pid)
            serving = [*whole.children()] if workers > 1 else [whole]
            ports = [f"--http={router.http_port}", f"--registry={router.registry}"]
            command = [sys.executable, "-m", LOAD, *counts, *ports, f"--folder={folder}/model"]
            with pinned(cores[1:]):
                load = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            return _passed(load, streams * tokens, whole, serving)
        finally:
            router.stop()


def _passed(
    process: subprocess.Popen[str],
    expected: int,
    whole: psutil.Process,
    serving: list[psutil.Process],
) -> WorkersRound:
    try:
        assert process.stdout is not None
        json.loads(process.stdout.readline())
        before = [_cpu(one) for one in (whole, *serving)]
        counted = json.loads(process.stdout.readline())
        spent = [_cpu(one) - was for one, was in zip((whole, *serving), before, strict=True)]
        process.wait(RUN_SECONDS)
    finally:
        process.kill()
        process.communicate()
    if counted["received"] != expected:
        raise RuntimeError(f"{counted['received']} tokens of {expected} came")
    return WorkersRound(
        expected, counted["events"], tuple(spent[1:]), spent[0] if len(serving) > 1 else 0.0
    )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def rows(streams: int, one: list[WorkersRound], two: list[WorkersRound]) -> list[dict[str, Any]]:
    """The report's rows of one load."""
    alone = max(each.capacity for each in one)
    both = max(each.capacity for each in two)
    load = f"{streams} streams"
    keeper = min(each.keeper / sum(each.workers) for each in two)
    return [
        {
            "metric": f"router with two workers, {load}: tokens, with a core for each",
            "value": both,
            "unit": "tokens/s",
            "goal": f">={GOAL}",
            "against": f"one process ({alone:.0f} tokens/s)",
            "ratio": both / alone,
        },
        {
            "metric": f"keeper of two workers, {load}: CPU time, of that of its workers",
            "value": keeper,
            "unit": "",
        },
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=102_400, help="of all streams together")
    parser.add_argument("--rounds", type=int, default=4)
    add_dry(parser)
    options = parser.parse_args()
    found = [measure(streams, options) for streams in options.streams]
    publish("router/router_workers", [row for one in found for row in one], dry=options.dry)


def measure(streams: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    one, two = [], []
    for _ in range(options.rounds):
        one.append(one_round(streams, options.tokens // streams, 1))
        two.append(one_round(streams, options.tokens // streams, 2))
        print(one[-1], two[-1], file=sys.stderr)
    return rows(streams, one, two)


if __name__ == "__main__":
    main()
