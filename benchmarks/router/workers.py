"""Two routers on one port against one: ``python -m ...router.workers``.

The node and all clients share one process (``router_tokens_load.py``) that takes a whole core, so
on a two-core machine the routers share the other core. Their capacity with one core each is
estimated as the tokens over the CPU time of the busier router, which accounts for smaller messages
and for uneven connections. Each figure is the best of ``--rounds``, taken alternately, because the
machine is shared.
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
class Round:
    """Tokens and events forwarded in one round, and the CPU seconds of each router."""

    tokens: int
    events: int
    routers: tuple[float, ...]

    @property
    def capacity(self) -> float:
        """Tokens a second if each router had a core."""
        return self.tokens / max(self.routers)


def one_round(streams: int, tokens: int, routers: int) -> Round:
    """``tokens`` of each of ``streams``, through routers on one core."""
    cores = two_cores()
    counts = [f"--streams={streams}", f"--tokens={tokens}"]
    with tempfile.TemporaryDirectory() as folder:
        flags = (f"--router-workers={routers}", "--no-access-log")
        with pinned(cores[:1]):
            router = MeasuredRouter(Path(folder) / "router.log", 1, *flags, apart=True)
        try:
            head = psutil.Process(router.process.pid)
            serving = [*head.children()] if routers > 1 else [head]
            registries = ",".join(router.registries)
            ports = [f"--http={router.http_port}", f"--registry={registries}"]
            command = [sys.executable, "-m", LOAD, *counts, *ports, f"--folder={folder}/model"]
            with pinned(cores[1:]):
                load = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            return _measure_round(load, streams * tokens, serving)
        finally:
            router.stop()


def _measure_round(
    process: subprocess.Popen[str], expected: int, serving: list[psutil.Process]
) -> Round:
    try:
        assert process.stdout is not None
        json.loads(process.stdout.readline())
        before = [_cpu(one) for one in serving]
        report = json.loads(process.stdout.readline())
        cpu_seconds = [_cpu(one) - was for one, was in zip(serving, before, strict=True)]
        process.wait(RUN_SECONDS)
    finally:
        process.kill()
        process.communicate()
    if report["received"] != expected:
        raise RuntimeError(f"{report['received']} tokens of {expected} came")
    return Round(expected, report["events"], tuple(cpu_seconds))


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def row(streams: int, one: list[Round], two: list[Round]) -> dict[str, Any]:
    """Row of the report for one load."""
    alone = max(each.capacity for each in one)
    both = max(each.capacity for each in two)
    return {
        "metric": f"two routers on one port, {streams} streams: tokens, with a core for each",
        "value": both,
        "unit": "tokens/s",
        "goal": f">={GOAL}",
        "against": f"one router ({alone:.0f} tokens/s)",
        "ratio": both / alone,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=102_400, help="of all streams together")
    parser.add_argument("--rounds", type=int, default=4)
    add_dry(parser)
    options = parser.parse_args()
    rounds = [measure(streams, options) for streams in options.streams]
    publish("router/workers", rounds, dry=options.dry)


def measure(streams: int, options: argparse.Namespace) -> dict[str, Any]:
    one, two = [], []
    for _ in range(options.rounds):
        one.append(one_round(streams, options.tokens // streams, 1))
        two.append(one_round(streams, options.tokens // streams, 2))
        print(one[-1], two[-1], file=sys.stderr)
    return row(streams, one, two)


if __name__ == "__main__":
    main()
