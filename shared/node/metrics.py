"""A node's metrics, served on its health port.

Each node has its own registry instead of the library's global one: a test process may run two
nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...proto import tandem_pb2 as pb
from ..engine.core import EngineCore
from ..handoff.plane.stats import DataPlaneStats
from ..kv.prefix_keys import pack_keys
from ..telemetry.prompt_metrics import PromptMetrics
from ..telemetry.stats_line import Work
from .engine_metrics import QUEUE_SECONDS, EngineCollector
from .plane_metrics import PlaneCollector
from .transfer_metrics import TransferMetrics

# Outcomes of canaries. Each has a series from the start, so that its first event is an increase.
CANARY_OUTCOMES = PASSED, FAILED, MISMATCH = "passed", "failed", "mismatch"


class NodeMetrics:
    """Metrics of the node ``node_id``.

    ``planes`` are its ranks' last reports. A role that grants leases sets ``count_leases``; a role
    that measures links sets ``link_rates``.
    """

    def __init__(
        self,
        core: EngineCore,
        planes: Mapping[int, DataPlaneStats],
        node_id: str,
        model_name: str = "",
    ) -> None:
        self._core = core
        self._planes = planes
        self._node_id = node_id
        self.count_leases: Callable[[], int] = lambda: 0
        self.link_rates: Callable[[], list[pb.LinkRate]] = list
        self.registry = CollectorRegistry()
        self.registry.register(PlaneCollector(planes))
        self.transfers = TransferMetrics(self.registry)
        self.registry.register(EngineCollector(core, model_name))
        queued = Histogram(
            "tandem_queue_seconds",
            "Time from a sequence's arrival in the queue to its first step.",
            registry=self.registry,
            buckets=QUEUE_SECONDS,
        )
        core.on_started = queued.observe
        self.prompts = PromptMetrics(self.registry)
        self.canaries = Counter(
            "tandem_canaries",
            "Comparisons of a decode node's KV with a prefill node's, by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in CANARY_OUTCOMES:
            self.canaries.labels(outcome)
        self.live_transfers = Gauge(
            "tandem_transfers_live", "Transfers in flight.", registry=self.registry
        )
        self._leases = Gauge(
            "tandem_leases",
            "Transfers whose KV is kept for a decode node.",
            registry=self.registry,
        )
        self._leases.set_function(lambda: self.count_leases())
        self._blocks = Gauge(
            "tandem_kv_blocks", "KV blocks by state.", ["state"], registry=self.registry
        )

    def text(self) -> bytes:
        """All series in Prometheus' text format, each with the label ``node``."""
        self._refresh()
        page = CollectorRegistry()
        page.register(_WithNodeLabel(self.registry, self._node_id))
        return generate_latest(page)

    def samples(self) -> list[pb.Metric]:
        """All series as messages, for the doctor."""
        self._refresh()
        return [
            pb.Metric(name=sample.name, labels=sample.labels, value=sample.value)
            for family in self.registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]

    def work(self) -> Work:
        """Work of the node, for the periodic log line."""
        load, counters = self._core.load(), self._core.counters
        return Work(
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            cache_queries=counters.cache_queries,
            cache_hits=counters.cache_hits,
            running=load.running,
            waiting=load.waiting,
            transfers=int(self.live_transfers._value.get()),
            kv_usage=load.kv_usage,
        )

    def load(self) -> pb.Load:
        """The load report, for placement."""
        load = self._core.load()
        return pb.Load(
            running=load.running,
            waiting=load.waiting,
            free_blocks=load.blocks.available,
            total_blocks=load.num_blocks,
            queued_prefill_tokens=load.queued_prefill_tokens,
            transfers=int(self.live_transfers._value.get()),
            prefill_tokens_per_second=self._core.prefill_tokens_per_second,
            reserved_blocks=load.blocks.reserved,
            cached_blocks=load.blocks.cached,
            owned_blocks=load.blocks.owned,
            links=sum(p.connections for p in self._planes.values()),
            leases=self.count_leases(),
            block_size=load.block_size,
            link_rates=self.link_rates(),
        )

    def prefixes(self, version: int) -> pb.Prefixes | None:
        """Changes of the prefix index since ``version`` (0: everything); ``None`` without a prefix
        index."""
        changes = self._core.prefix_changes(version)
        if changes is None:
            return None
        return pb.Prefixes(
            version=changes.version,
            base=changes.base,
            block_size=self._core.load().block_size,
            stride=changes.stride,
            added=pack_keys(changes.added),
            removed=pack_keys(changes.removed),
        )

    def _refresh(self) -> None:
        counts = self._core.load().blocks
        for state in ("free", "cached", "owned", "reserved"):
            self._blocks.labels(state).set(getattr(counts, state))


class _WithNodeLabel(Collector):
    """The series of a registry with the label ``node``, for joins with the router's series."""

    def __init__(self, registry: CollectorRegistry, node_id: str) -> None:
        self._registry = registry
        self._label = {"node": node_id}

    def describe(self) -> tuple[Metric, ...]:
        """Empty, so that registering does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, **self._label})
                for sample in family.samples
            ]
            yield family
