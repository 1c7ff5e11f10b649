"""The router's metrics page: its own series under vLLM's names, and a few of each node."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from ..shared.telemetry.stats_line import Work
from ..shared.telemetry.tracing import current
from .cluster.node_series import NodeCounts, count_nodes, text
from .cluster.node_table import NodeTable
from .generation import ChoiceDelta, GenerationRequest, Output, Usage
from .http.access_log import AccessRecord, prefill_origin

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABEL = ("model_name",)
FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
BETWEEN = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
WHOLE = (0.05, 0.1, 0.3, 0.5, 1, 1.5, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1800)
# A page is reused for this many times as long as it took to render, and at most for a second, so
# that scrapes take a small share of a core with any number of nodes.
PAGE_REUSE = 10.0
MAX_PAGE_SECONDS = 1.0


class Metrics:
    """All series, in a registry of its own: two routers in one process do not mix."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._page: asyncio.Task[bytes] | None = None
        self._page_until = 0.0
        self.registry = CollectorRegistry()
        self.registry.register(nodes.absent.lost)
        self.registry.register(nodes.absent.refused)
        self.registry.register(nodes.ejections)
        self.registry.register(nodes.unsupported)
        self.running = Gauge(
            "vllm:num_requests_running", "Requests in progress.", LABEL, registry=self.registry
        )
        self._add_times()
        self._add_counts()

    def _add_times(self) -> None:
        own = self.registry
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the parsed request to its first output.",
            LABEL,
            buckets=FIRST_TOKEN,
            registry=own,
        )
        self.phases = Histogram(
            "tandem_first_token_phase_seconds",
            "Time to first token by where it went, of requests with one prompt.",
            ("phase",),
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

    def _add_counts(self) -> None:
        own = self.registry
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens", "Prompt tokens of finished requests.", LABEL, registry=own
        )
        self.cached_tokens = Counter(
            "tandem_router_cached_tokens",
            "Of these, the tokens that decode nodes had in their prefix index.",
            LABEL,
            registry=own,
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
        self.prompts = Counter(
            "tandem_router_prompts",
            "Prompts by where they were prefilled, and why not elsewhere.",
            ("where", "reason"),
            registry=own,
        )
        self.errors = Counter(
            "tandem_request_errors", "Answers with an error, by status.", ("status",), registry=own
        )

    def work(self) -> Work:
        """The router's work, with the queues and caches of its decode nodes."""
        loads = [node.load for node in self._nodes if not node.is_prefill]
        blocks = sum(load.total_blocks for load in loads)
        taken = sum(load.owned_blocks + load.reserved_blocks for load in loads)
        prompts = _total(self.prompt_tokens)
        return Work(
            prompt_tokens=prompts,
            generated_tokens=_total(self.generated_tokens),
            cache_queries=prompts,
            cache_hits=_total(self.cached_tokens),
            running=int(_total(self.running)),
            waiting=sum(load.waiting for load in loads),
            transfers=sum(load.transfers for load in loads),
            kv_usage=taken / blocks if blocks else 0.0,
        )

    def add(self, series: Collector) -> None:
        """Add the series of another part of the router."""
        self.registry.register(series)

    def render(self) -> bytes:
        """Render everything in Prometheus' text format."""
        return self._render(*self._counts())

    async def page(self) -> bytes:
        """The page, rendered in a thread and at most a second old."""
        if self._page is None or (self._page.done() and time.monotonic() >= self._page_until):
            self._page = asyncio.create_task(self._new_page())
        # Shielded, because others wait for the same page, and the first may disconnect.
        return await asyncio.shield(self._page)

    async def _new_page(self) -> bytes:
        begun = time.monotonic()
        page = await asyncio.to_thread(self._render, *self._counts())
        done = time.monotonic()
        self._page_until = done + min(MAX_PAGE_SECONDS, PAGE_REUSE * (done - begun))
        return page

    def _counts(self) -> tuple[list[NodeCounts], Counts[tuple[str, str]]]:
        return count_nodes(self._nodes, self._nodes.now()), self._nodes.absent.tally()

    def _render(self, counts: Sequence[NodeCounts], absent: Counts[tuple[str, str]]) -> bytes:
        return generate_latest(self.registry) + text(counts, absent).encode()


def _total(series: Counter | Gauge) -> float:
    """The sum over all labels."""
    samples = (sample for family in series.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if not sample.name.endswith("_created"))


class RequestMetrics:
    """Times and counts one request; a context manager around the time it is in progress."""

    def __init__(self, metrics: Metrics, request: GenerationRequest, access: AccessRecord) -> None:
        self._metrics = metrics
        self._access = access
        access.model = self._name = request.model.name
        access.prompt_tokens = request.prompt_tokens
        self._between = metrics.between.labels(self._name)
        self._tokens = metrics.generated_tokens.labels(self._name)
        self._start = 0.0
        self._last: dict[int, float] = {}

    def __enter__(self) -> RequestMetrics:
        self._start = self._access.begun = time.monotonic()
        self._metrics.running.labels(self._name).inc()
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.running.labels(self._name).dec()
        for served in self._access.usage.served.values():
            if served.computed.prompt_tokens:
                self._metrics.prompts.labels(*prefill_origin(served)).inc()

    def count(self, output: Output) -> None:
        """Observe an output when it is written."""
        if isinstance(output, ChoiceDelta):
            self._count_delta(output)

    def finish(self, usage: Usage) -> None:
        """Observe the end of the request, when every choice has finished."""
        self._metrics.whole.labels(self._name).observe(time.monotonic() - self._start)
        self._metrics.prompt_tokens.labels(self._name).inc(usage.prompt_tokens)
        self._metrics.cached_tokens.labels(self._name).inc(usage.cached_tokens)

    def _count_delta(self, delta: ChoiceDelta) -> None:
        now = time.monotonic()
        count = len(delta.tokens)
        if count:
            last = self._last.get(delta.index)
            if last is not None:
                for _ in range(count):
                    self._between.observe((now - last) / count)
            elif not self._last:
                self._metrics.first_token.labels(self._name).observe(now - self._start)
                self._access.first_token_seconds = round(now - self._start, 4)
                current().event("first token")
                phases = self._access.phases()
                current().set(**{f"first_token_{name}": spent for name, spent in phases.items()})
                for name, spent in phases.items():
                    self._metrics.phases.labels(name).observe(spent)
            self._last[delta.index] = now
            self._tokens.inc(count)
            self._access.output_tokens += count
        if delta.finish_reason is not None:
            self._metrics.success.labels(self._name, delta.finish_reason).inc()
            self._access.finish_reasons[delta.finish_reason] += 1
