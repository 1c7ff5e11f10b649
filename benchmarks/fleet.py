"""A router with a thousand nodes: nodes dropped, and responsiveness.

``python -m tandem.benchmarks.fleet [--nodes N] [--seconds S]``

Three processes: a real ``tandem router``; all nodes, simulated in one process by real
``Registration`` objects with one connection each (``fleet_nodes.py``); and this one, which requests
``/health`` twenty times a second and ``/metrics`` every second, and counts the lost nodes in the
router's log. The CPU shares of the first two show which of them is the bottleneck. If the
simulation's event loop is delayed by more than the heartbeat slack (3 s less 1 s), the simulation
caused the missed heartbeats.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tandem.bench.report.figures import percentile
from tandem.benchmarks.support.neighbours import Neighbours
from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.shared.process.lifeline import read_announcements
from tandem.shared.process.open_files import allow_many_files

HEALTH_SECONDS = 0.05
SCRAPE_SECONDS = 1.0
SETTLE_SECONDS = 5.0
RPC_SECONDS = 30.0
JOIN_SECONDS = 300.0
LOST = re.compile(r"node \S+ was silent for")
AGE = re.compile(rb"tandem_node_heartbeat_age_seconds\{[^}]*\} (\S+)")


class MeasuredRouter:
    """A router process, or the launcher of several, that logs to ``log``; in its own session if
    ``apart``, as launched routers are.

    Linux schedules sessions as groups: on a busy machine a process alone in its session uses 50 %
    more CPU time for the same work.
    """

    def __init__(self, log: Path, nodes: int, *more_flags: str, apart: bool = False) -> None:
        self._log = log
        read, ready = os.pipe()
        flags = ("--port=0", "--registry-port=0", f"--max-nodes={max(nodes, 1024)}")
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tandem", "router", *flags, *more_flags],
                pass_fds=[ready],
                env=os.environ | {"TANDEM_READY_FD": str(ready)},
                stderr=output,
                start_new_session=apart,
            )
        os.close(ready)
        with os.fdopen(read, "rb") as pipe:
            _, ports = read_announcements(pipe.read())
        if not ports:
            raise RuntimeError(f"the router did not start: {log.read_text()}")
        self.http_port, self.registry = ports["http"], f"127.0.0.1:{ports['registry']}"
        self.registries = [
            f"127.0.0.1:{each['registry']}" for each in ports.get("routers", [ports])
        ]
        self._stat = psutil.Process(self.process.pid)

    def memory(self) -> float:
        """Resident memory in MB."""
        return float(self._stat.memory_info().rss) / 1e6

    def cpu_seconds(self) -> float:
        times = self._stat.cpu_times()
        return float(times.user + times.system)

    def lost(self) -> int:
        """Number of nodes dropped for missed heartbeats."""
        return len(LOST.findall(self._log.read_text()))

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Probe(threading.Thread):
    """Requests ``path`` every ``period`` seconds and records each response's delay after its
    scheduled time."""

    def __init__(self, port: int, path: str, period: float) -> None:
        super().__init__(daemon=True)
        self._port, self._path, self._period = port, path, period
        self._over = threading.Event()
        self.late: list[float] = []
        self.failures = 0
        self.body = b""

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=RPC_SECONDS)
        due = time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            start = max(due, time.monotonic())
            try:
                connection.request("GET", self._path)
                response = connection.getresponse()
                self.body = response.read()
                self.failures += response.status != 200
            except (OSError, http.client.HTTPException):
                self.failures += 1
                connection.close()
            self.late.append(time.monotonic() - start)
            due = max(due + self._period, time.monotonic() - self._period)
        connection.close()

    def stop(self) -> None:
        self._over.set()
        self.join(RPC_SECONDS)


@contextmanager
def _nodes(router: MeasuredRouter, options: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    """Start the simulation and wait until all of its nodes have joined."""
    counts = [
        f"--{name}={getattr(options, name)}" for name in ("nodes", "keys", "changes", "links")
    ]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tandem.benchmarks.support.fleet_nodes",
            router.registry,
            *counts,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(JOIN_SECONDS + options.nodes / 50, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the nodes did not join")
        watchdog.cancel()
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run the fleet for ``options.seconds`` and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        router = MeasuredRouter(Path(folder) / "router.log", options.nodes)
        try:
            with _nodes(router, options) as nodes:
                time.sleep(
                    min(SETTLE_SECONDS, options.seconds)
                )  # until the last nodes have reported their prefixes
                return _watch(router, nodes, options)
        finally:
            router.stop()


def _watch(
    router: MeasuredRouter, nodes: subprocess.Popen[str], options: argparse.Namespace
) -> dict[str, float]:
    health = Probe(router.http_port, "/health", HEALTH_SECONDS)
    scrape = Probe(router.http_port, "/metrics", SCRAPE_SECONDS)
    cores = sorted(os.sched_getaffinity(0))
    neighbours = Neighbours(cores)
    lost, cpu, start = router.lost(), router.cpu_seconds(), time.monotonic()
    for probe in (health, scrape):
        probe.start()
    peak, oldest = 0.0, 0.0
    while time.monotonic() - start < options.seconds:
        time.sleep(min(1.0, options.seconds))
        peak = max(peak, router.memory())
        oldest = max([oldest, *(float(age) for age in AGE.findall(scrape.body))])
    elapsed = time.monotonic() - start
    for probe in (health, scrape):
        probe.stop()
    others = neighbours.share()
    output, _ = nodes.communicate("", timeout=RPC_SECONDS)
    report = json.loads(output)
    for trouble, count in report["troubles"].items():
        print(f"{count} x {trouble}", file=sys.stderr)
    return {
        "dropped": router.lost() - lost,
        "joined again": report["joins"] - options.nodes,
        "listed": scrape.body.count(b"tandem_node_up{"),
        "failed probes": health.failures + scrape.failures,
        "health median": statistics.median(health.late),
        "health p99": percentile(health.late, 99),
        "health worst": max(health.late),
        "scrape p99": percentile(scrape.late, 99),
        "scrape bytes": len(scrape.body),
        "oldest heartbeat": oldest,
        "memory": peak,
        "router cores": (router.cpu_seconds() - cpu) / elapsed,
        "simulation cores": report["cpu_seconds"] / elapsed,
        "simulation late": report["late"],
        "others": others,
    }


def rows(options: argparse.Namespace, figures: dict[str, float]) -> list[dict[str, Any]]:
    """The report's rows."""
    fleet = f"{options.nodes} nodes, {options.keys} keys each, {options.seconds:g} s"
    columns = (
        ("dropped", "nodes dropped", "nodes", "<=0"),
        ("joined again", "nodes that joined again", "joins", "<=0"),
        ("listed", "nodes on the last page of metrics", "nodes", f">={options.nodes}"),
        ("failed probes", "probes without an answer of 200", "probes", "<=0"),
        ("health median", "/health late, median", "s", ""),
        ("health p99", "/health late, p99", "s", "<=0.05"),
        ("health worst", "/health late, worst", "s", ""),
        ("scrape p99", "/metrics late, p99, a scrape a second", "s", ""),
        ("scrape bytes", "page of metrics", "bytes", ""),
        ("oldest heartbeat", "oldest heartbeat of any scrape", "s", ""),
        ("memory", "router's resident memory", "MB", "<=1000"),
        ("router cores", "router's share of a core", "cores", ""),
        ("simulation cores", "simulated nodes' share of a core", "cores", ""),
        ("simulation late", "simulated nodes' event loop late, worst", "s", ""),
        ("others", "share of the cores that other processes took", "", ""),
    )
    return [
        {"metric": f"{fleet}: {name}", "value": figures[key], "unit": unit, "goal": goal}
        for key, name, unit, goal in columns
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse ``arguments``, by default the command line's."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--keys", type=int, default=16384, help="prefix keys that a node keeps")
    parser.add_argument("--changes", type=int, default=10, help="of them, replaced a heartbeat")
    parser.add_argument("--links", type=int, default=16, help="measured links of a decode node")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    allow_many_files()
    figures = rows(options, measure(options))
    publish("fleet", figures, dry=options.dry)


if __name__ == "__main__":
    main()
