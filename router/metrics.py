"""What /metrics shows: the router's series under vLLM's names, and those of its nodes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..shared.roles import role_name
from ..shared.tracing import current
from .generation import Delta, Done, Generation, Usage
from .nodes import Node, NodeTable

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
LABEL = ("model_name",)
FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
BETWEEN = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
WHOLE = (0.05, 0.1, 0.3, 0.5, 1, 1.5, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1800)
METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
HISTOGRAM = re.compile(r"(.*)_(bucket|sum|count)")
LOAD_FIELDS = (
    "running",
    "waiting",
    "free_blocks",
    "total_blocks",
    "reserved_blocks",
    "cached_blocks",
    "owned_blocks",
    "queued_prefill_tokens",
    "transfers",
)


class Metrics:
    """Owns a registry of its own: two routers in one process do not mix."""

    def __init__(self, nodes: NodeTable) -> None:
        self._registry = own = CollectorRegistry()
        self.running = Gauge(
            "vllm:num_requests_running", "Requests in progress.", LABEL, registry=own
        )
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the parsed request to its first output.",
            LABEL,
            buckets=FIRST_TOKEN,
            registry=own,
        )
        self.between = Histogram(
            "vllm:inter_token_latency_seconds",
            "Between two outputs of a choice, a token.",
            LABEL,
            buckets=BETWEEN,
            registry=own,
        )
        self.whole = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From the parsed request to its end.",
            LABEL,
            buckets=WHOLE,
            registry=own,
        )
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens", "Prompt tokens of finished requests.", LABEL, registry=own
        )
        self.generated_tokens = Counter(
            "vllm:generation_tokens", "Tokens generated.", LABEL, registry=own
        )
        self.success = Counter(
            "vllm:request_success",
            "Choices that finished, by reason.",
            (*LABEL, "finished_reason"),
            registry=own,
        )
        self.errors = Counter(
            "tandem_request_errors", "Answers with an error, by status.", ("status",), registry=own
        )
        own.register(_NodeSeries(nodes, own))

    def add(self, series: Collector) -> None:
        """Show what another part of the router counts."""
        self._registry.register(series)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class RequestMetrics:
    """The clock of one request; a context manager around the time it is in progress."""

    def __init__(self, metrics: Metrics, generation: Generation) -> None:
        self._metrics = metrics
        self._name = generation.model.name
        self._between = metrics.between.labels(self._name)
        self._tokens = metrics.generated_tokens.labels(self._name)
        self._start = 0.0
        self._last: dict[int, float] = {}

    def __enter__(self) -> RequestMetrics:
        self._start = time.monotonic()
        self._metrics.running.labels(self._name).inc()
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.running.labels(self._name).dec()

    def delta(self, delta: Delta) -> None:
        """Output has come."""
        now = time.monotonic()
        count = len(delta.tokens)
        if count:
            last = self._last.get(delta.index)
            if last is not None:
                for _ in range(count):
                    self._between.observe((now - last) / count)
            elif not self._last:
                self._metrics.first_token.labels(self._name).observe(now - self._start)
                current().event("first token")
            self._last[delta.index] = now
            self._tokens.inc(count)
        if delta.finish_reason is not None:
            self._metrics.success.labels(self._name, delta.finish_reason).inc()

    def done(self, done: Done) -> Usage:
        self._metrics.whole.labels(self._name).observe(time.monotonic() - self._start)
        self._metrics.prompt_tokens.labels(self._name).inc(done.usage.prompt_tokens)
        return done.usage


class _NodeSeries:
    """The nodes' samples as they came in heartbeats, and their load, each with a ``node`` label."""

    def __init__(self, nodes: NodeTable, own: CollectorRegistry) -> None:
        self._nodes = nodes
        self._own = own

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the nodes have joined."""
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for node in self._nodes:
            self._add_load(families, node)
            self._add_samples(families, node)
        yield from families.values()

    def _add_load(self, families: dict[str, Metric], node: Node) -> None:
        labels = {"node": node.node_id, "role": role_name(node.role)}
        for field in LOAD_FIELDS:
            name = f"tandem_node_{field}"
            family = families.setdefault(name, Metric(name, "From the last heartbeat.", "gauge"))
            family.add_sample(name, labels, float(getattr(node.load, field)))

    def _add_samples(self, families: dict[str, Metric], node: Node) -> None:
        histograms = {
            match[1]
            for sample in node.metrics
            if (match := HISTOGRAM.fullmatch(sample.name)) and match[2] == "bucket"
        }
        own = self._own._names_to_collectors
        for sample in node.metrics:
            name, kind = _family(sample.name, histograms)
            # A node must not be able to spoil the page, nor to add to the router's own series.
            usable = METRIC_NAME.fullmatch(sample.name) and name not in own
            if not usable or not all(map(LABEL_NAME.fullmatch, sample.labels)):
                continue
            family = families.setdefault(name, Metric(name, "From the nodes.", kind))
            if family.type == kind and not math.isnan(sample.value):
                labels = {**sample.labels, "node": node.node_id}
                family.add_sample(sample.name, labels, sample.value)


def _family(name: str, histograms: set[str]) -> tuple[str, str]:
    """The family's name and type, by Prometheus' naming rules."""
    match = HISTOGRAM.fullmatch(name)
    if match and match[1] in histograms:
        return match[1], "histogram"
    if name.endswith("_total"):
        return name.removesuffix("_total"), "counter"
    return name, "gauge"
