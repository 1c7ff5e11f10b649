"""Ways to use the same cores: the processes of one side of a comparison."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem.shared.launch.cluster import LocalCluster
from tandem.tests.end_to_end.support.cluster import get, until

START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Side:
    """One way to use two cores: each node's kind, its cores by position, its flags."""

    name: str
    nodes: tuple[tuple[str, tuple[int, ...], tuple[str, ...]], ...]


APART = Side(
    "disaggregated",
    (("prefill-node", (0,), ("--threads=1",)), ("decode-node", (1,), ("--threads=1",))),
)
STRANGER = Side(
    "disaggregated, the prompt at another server", (("decode-node", (0,), ("--threads=1",)),)
)
TOGETHER = Side("aggregated, chunks cut by time", (("decode-node", (0, 1), ("--threads=2",)),))
WHOLE_CHUNKS = Side(
    "aggregated, whole chunks", (("decode-node", (0, 1), ("--threads=2", "--itl-target=0")),)
)
REPLICAS = Side(
    "aggregated replicas",
    (("decode-node", (0,), ("--threads=1",)), ("decode-node", (1,), ("--threads=1",))),
)


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Pin processes started inside the block to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def serving(
    side: Side, cores: Sequence[int], model: Path, logs: Path, *more_flags: str
) -> Iterator[int]:
    """Run the side's processes, nodes with ``more_flags``; gives the router's port."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
    logs.mkdir(parents=True, exist_ok=True)
    cluster, deadline = LocalCluster(logs, environment), time.monotonic() + START_SECONDS
    try:
        router = cluster.start("router", ["router", "--port=0", "--registry-port=0"])
        ports = cluster.wait_ready(router, deadline)
        join = f"--join=127.0.0.1:{ports['registry']}"
        names = [f"{kind}-{index}" for index, (kind, _, _) in enumerate(side.nodes)]
        for name, (kind, places, flags) in zip(names, side.nodes, strict=True):
            options = [join, f"--node-id={name}", "--drain-timeout=1", *flags, *more_flags]
            with pinned([cores[place] for place in places]):
                node = cluster.start(name, [kind, str(model), *options])
            cluster.wait_ready(node, deadline)
        metrics = f"http://127.0.0.1:{ports['http']}/metrics"
        for name in names:
            until(lambda name=name: f'node="{name}"' in get(metrics), f"{name} to join")  # type: ignore[misc]
        yield int(ports["http"])
    finally:
        cluster.stop()
