"""Startup time from command to ready, and the memory of a router.

``python -m tandem.benchmarks.startup``
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tandem.benchmarks.fleet import MeasuredRouter
from tandem.benchmarks.support.report import publish

RUNS = 5


def router_alone(folder: Path) -> float:
    """Seconds until a router listens."""
    start = time.perf_counter()
    router = MeasuredRouter(folder / "router.log", 1)
    seconds = time.perf_counter() - start
    router.stop()
    return seconds


def cluster(folder: Path) -> tuple[float, float]:
    """Seconds until ``tandem serve`` with a prefill node is ready, and the router's memory in
    MB."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tandem",
            "serve",
            "--port=0",
            "--prefill-nodes=1",
            "--share-devices",
            f"--log-dir={folder}",
            "--drain-timeout=1",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    greeting = process.stdout.readline()
    seconds = time.perf_counter() - start
    if "ready" not in greeting:
        raise RuntimeError(f"the cluster did not start; see {folder}")
    children = psutil.Process(process.pid).children()
    router = next(child for child in children if "router" in child.cmdline())
    memory = router.memory_info().rss / 1e6
    process.send_signal(signal.SIGINT)
    process.wait(60)
    process.stdout.close()
    return seconds, memory


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cluster(Path(folder))  # fills the page cache
        whole = [cluster(Path(folder)) for _ in range(RUNS)]
        alone = [router_alone(Path(folder)) for _ in range(RUNS)]
    rows = [
        ("cluster ready (median)", statistics.median(s for s, _ in whole), "s", "<=6"),
        ("router ready (median)", statistics.median(alone), "s", "<=1.5"),
        ("router resident memory, serving", max(m for _, m in whole), "MB", "<=150"),
    ]
    publish("startup", [{"metric": m, "value": v, "unit": u, "goal": g} for m, v, u, g in rows])


if __name__ == "__main__":
    main()
