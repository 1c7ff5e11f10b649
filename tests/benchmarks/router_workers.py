"""A router with two workers against one process: ``python -m ...benchmarks.router_workers``.

The node and all clients are one process (``router_tokens_load.py``), which takes a whole core, so
two workers cannot have a core each on a machine of two. What they could pass on with one each is
the tokens over the CPU time of the busiest worker: it counts what workers cost each other, and how
evenly connections are spread over them. Each figure is the best of ``--rounds``, in turns, because
others use the machine too.
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

from .fleet import Router
from .report import load_parser, publish

LOAD = "tandem.tests.benchmarks.router_tokens_load"
RUN_SECONDS = 300.0
GOAL = 1.7


@dataclass(frozen=True, slots=True)
class Round:
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


def one_round(options: argparse.Namespace, workers: int) -> Round:
    with tempfile.TemporaryDirectory() as folder:
        flags = (f"--router-workers={workers}", "--no-access-log")
        router = Router(Path(folder) / "router.log", 1, *flags)
        try:
            whole = psutil.Process(router.process.pid)
            serving = [*whole.children()] if workers > 1 else [whole]
            return _load(options, router, whole, serving, folder)
        finally:
            router.stop()


def _load(
    options: argparse.Namespace,
    router: Router,
    whole: psutil.Process,
    serving: list[psutil.Process],
    folder: str,
) -> Round:
    counts = [f"--streams={options.streams}", f"--tokens={options.tokens}"]
    flags = [f"--http={router.http_port}", f"--registry={router.registry}"]
    process = subprocess.Popen(
        [sys.executable, "-m", LOAD, *counts, *flags, f"--folder={folder}/model"],
        stdout=subprocess.PIPE,
        text=True,
    )
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
    expected = options.streams * options.tokens
    if counted["received"] != expected:
        raise RuntimeError(f"{counted['received']} tokens of {expected} came")
    return Round(
        expected, counted["events"], tuple(spent[1:]), spent[0] if len(serving) > 1 else 0.0
    )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def rows(options: argparse.Namespace, one: list[Round], two: list[Round]) -> list[dict[str, Any]]:
    """The report's rows."""
    alone = max(each.capacity for each in one)
    both = max(each.capacity for each in two)
    load = f"{options.streams} streams"
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
    parser = load_parser(__doc__, streams=256, tokens=400, rounds=4)
    options = parser.parse_args()
    one, two = [], []
    for _ in range(options.rounds):
        one.append(one_round(options, 1))
        two.append(one_round(options, 2))
        print(one[-1], two[-1], file=sys.stderr)
    publish("router_workers", rows(options, one, two), dry=options.dry)


if __name__ == "__main__":
    main()
