"""One metrics page of all workers: each series once, with the sum over the workers.

The keeper adds what it alone knows: the nodes, and the calls of its registry.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter as Counts
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..telemetry.metrics import Metrics
from .process_link import Topic

# A page is reused for so long: several servers may scrape.
PAGE_SECONDS = 1.0
OPEN_FILES = "process_open_fds"
# Series of which a sum would mean nothing.
LARGEST = frozenset(
    (
        "tandem_build_info",
        "process_max_fds",
        OPEN_FILES,
        "tandem_certificate_expiry_timestamp_seconds",
    )
)
EARLIEST = frozenset(("process_start_time_seconds",))
# Of nodes, which only the keeper follows; and gauges that it computes from the requests of all.
KEEPERS = frozenset(
    (
        "tandem_nodes_lost",
        "tandem_nodes_refused",
        "tandem_registry_calls_refused",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
    )
)

# Kinds of series that only grow.
CUMULATIVE = ("counter", "histogram")

Labels = tuple[tuple[str, str], ...]
# Name, meaning, kind, and the samples with their labels, as they are told.
Family = list[Any]
Families = list[Family]


def describe(metrics: Metrics) -> bytes:
    """A worker's series, for its keeper."""
    fields = {
        "families": [_family(metric) for metric in metrics.registry.collect()],
        "requests": metrics.requests,
        "unstarted": metrics.unstarted,
    }
    return json.dumps(fields).encode()


class MergedPage:
    """The page of the keeper's ``metrics`` and those of all workers, which ``gather`` asks."""

    def __init__(
        self, metrics: Metrics, gather: Callable[[Topic], Awaitable[dict[int, bytes]]]
    ) -> None:
        """``gather`` gives the answers by the workers' numbers."""
        self._metrics = metrics
        self._gather = gather
        self._told: dict[int, Families] = {}
        self._ended: dict[str, _SummedSeries] = {}
        self._page: asyncio.Task[bytes] | None = None
        self._until = 0.0

    async def get(self) -> bytes:
        """The page, at most a second old."""
        if self._page is None or (self._page.done() and time.monotonic() >= self._until):
            self._page = asyncio.create_task(self._new_page())
        return await asyncio.shield(self._page)

    async def most_open_files(self) -> int:
        """The number of files that the worker with the most has open."""
        await self.get()
        counts = (
            value
            for families in self._told.values()
            for name, _, _, samples in families
            if name == OPEN_FILES
            for _, _, value in samples
        )
        return int(max(counts, default=0))

    def worker_ended(self, number: int) -> None:
        """Go on counting what a worker has counted: a sum that falls would look like a restart."""
        told = self._told.pop(number, [])
        _add(self._ended, (family for family in told if family[2] in CUMULATIVE))

    async def _new_page(self) -> bytes:
        told = await self._gather(Topic.SERIES)
        workers = await asyncio.to_thread(
            lambda: {number: json.loads(one) for number, one in told.items()}
        )
        self._metrics.requests = _sum(one["requests"] for one in workers.values())
        self._metrics.unstarted = _sum(one["unstarted"] for one in workers.values())
        # One that does not answer has not gone back to zero either.
        self._told |= {number: one["families"] for number, one in workers.items()}
        parts = [*self._told.values(), [series.family() for series in self._ended.values()]]
        page = await self._metrics.page_with(lambda own: merged(own, parts))
        self._until = time.monotonic() + PAGE_SECONDS
        return page


def merged(own: CollectorRegistry, workers: Iterable[Families]) -> bytes:
    """The text of the keeper's registry, with the workers' series added to it."""
    total: dict[str, _SummedSeries] = {}
    _add(total, (_family(metric) for metric in own.collect()))
    for told in workers:
        _add(total, (family for family in told if family[0] not in KEEPERS))
    registry = CollectorRegistry()
    registry.register(_AllSeries(total.values()))
    return generate_latest(registry)


def _family(metric: Metric) -> Family:
    samples = [[sample.name, sample.labels, sample.value] for sample in metric.samples]
    return [metric.name, metric.documentation, metric.type, samples]


def _add(total: dict[str, _SummedSeries], families: Iterable[Family]) -> None:
    for name, meaning, kind, samples in families:
        made = total.setdefault(name, _SummedSeries(name, meaning, kind))
        for sample_name, labels, value in samples:
            made.add(sample_name, labels, value)


class _SummedSeries:
    """One series of all processes, by labels."""

    def __init__(self, name: str, meaning: str, kind: str) -> None:
        self._name, self._meaning, self._kind = name, meaning, kind
        self._values: dict[tuple[str, Labels], float] = {}

    def add(self, sample: str, labels: dict[str, str], value: float) -> None:
        key = sample, tuple(labels.items())
        before = self._values.get(key)
        if before is None:
            self._values[key] = value
        elif self._name in LARGEST:
            self._values[key] = max(before, value)
        elif self._name in EARLIEST or sample.endswith("_created"):
            self._values[key] = min(before, value)
        else:
            self._values[key] = before + value

    def family(self) -> Family:
        samples = [
            [sample, dict(labels), value] for (sample, labels), value in self._values.items()
        ]
        return [self._name, self._meaning, self._kind, samples]

    def metric(self) -> Metric:
        made = Metric(self._name, self._meaning, self._kind)
        for (sample, labels), value in self._values.items():
            made.add_sample(sample, dict(labels), value)
        return made


class _AllSeries(Collector):
    def __init__(self, families: Iterable[_SummedSeries]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return (family.metric() for family in self._families)


def _sum(counts: Iterable[dict[str, int]]) -> Counts[str]:
    total: Counts[str] = Counts()
    for count in counts:
        total.update(count)
    return total
