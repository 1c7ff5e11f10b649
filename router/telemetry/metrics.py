"""The router's metrics page: its own series under vLLM's names, and a few series of each node."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

from ...shared.telemetry.stats_line import Work
from ..cluster.node_table import NodeTable
from ..usage import Usage
from .node_series import NodeCounts, count_nodes, text
from .vllm_series import FIRST_TOKEN, VllmSeries

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A page is reused for this many times its rendering time, but at most for a second, so that scrapes
# use a small share of a core with any number of nodes.
PAGE_REUSE = 10.0
MAX_PAGE_SECONDS = 1.0
# Statuses whose series exist from the start, so that rates include the first error.
SERVER_ERRORS = (500, 503, 504)


class Metrics:
    """All series of a router, in a registry of its own, so that a process can have two routers."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._page: asyncio.Task[bytes] | None = None
        self._page_until = 0.0
        self.registry = CollectorRegistry()
        self.registry.register(nodes.absent.lost)
        self.registry.register(nodes.absent.refused)
        self.registry.register(nodes.ejections)
        self.registry.register(nodes.migrations)
        # The served model. Autoscalers need its gauges before the first request.
        self.served_model: Callable[[], str] = lambda: ""
        self.requests: Counts[str] = Counts()  # in progress, by model
        self.unstarted: Counts[str] = Counts()  # requests without a token so far, by model
        self.vllm = VllmSeries(self.registry)
        own = self.registry
        self.phases = Histogram(
            "tandem_first_token_phase_seconds",
            "Time to first token by where it went, of requests with one prompt.",
            ("phase",),
            buckets=FIRST_TOKEN,
            registry=own,
        )
        self.cached_tokens = Counter(
            "tandem_router_cached_tokens",
            "Prompt tokens of finished requests that were in a prefix index of a decode node.",
            ("model_name",),
            registry=own,
        )
        self.prompts = Counter(
            "tandem_router_prompts",
            "Prompts by where they were prefilled, and the reason if that was a decode node.",
            ("where", "reason"),
            registry=own,
        )
        self.errors = Counter(
            "tandem_request_errors", "Error responses by status.", ("status",), registry=own
        )
        for status in SERVER_ERRORS:
            self.errors.labels(str(status))

    def count_error(self, status: int) -> None:
        """Count an error response, or an error event of a stream."""
        self.errors.labels(str(status)).inc()

    def count_sources(self, model: str, usage: Usage) -> None:
        """Count where the KV of a finished request came from."""
        missing = usage.prompt_tokens - usage.cached_tokens
        for name, tokens in (
            ("prompt_tokens", usage.prompt_tokens),
            ("prompt_tokens_cached", usage.cached_tokens + usage.remote_tokens),
            ("prefix_cache_queries", usage.prompt_tokens),
            ("prefix_cache_hits", usage.cached_tokens),
            ("external_prefix_cache_queries", max(0, missing)),
            ("external_prefix_cache_hits", usage.remote_tokens),
        ):
            self.vllm.counter(name, model).inc(tokens)
        for source, tokens in (
            ("local_compute", max(0, missing - usage.remote_tokens)),
            ("local_cache_hit", usage.cached_tokens),
            ("external_kv_transfer", usage.remote_tokens),
        ):
            self.vllm.counter("prompt_tokens_by_source", model, source).inc(tokens)
        self.cached_tokens.labels(model).inc(usage.cached_tokens)

    def work(self) -> Work:
        """The work of the router, and the queues and caches of its decode nodes."""
        loads = [node.load for node in self._nodes if not node.is_prefill]
        blocks = sum(load.total_blocks for load in loads)
        used_blocks = sum(load.owned_blocks + load.reserved_blocks for load in loads)
        return Work(
            prompt_tokens=self.vllm.total("prompt_tokens"),
            generated_tokens=self.vllm.total("generation_tokens"),
            cache_queries=self.vllm.total("prefix_cache_queries"),
            cache_hits=self.vllm.total("prefix_cache_hits"),
            running=self.requests.total(),
            waiting=sum(load.waiting for load in loads),
            transfers=sum(load.transfers for load in loads),
            kv_usage=used_blocks / blocks if blocks else 0.0,
        )

    def add(self, series: Collector) -> None:
        """Register the series of another part of the router."""
        self.registry.register(series)

    def render(self) -> bytes:
        """Render all series in Prometheus' text format."""
        return self._render(*self._counts())

    async def page(self) -> bytes:
        """The page, rendered in a thread and at most a second old."""
        if self._page is None or (self._page.done() and time.monotonic() >= self._page_until):
            self._page = asyncio.create_task(self._new_page())
        # Shielded: other clients wait for the same page when this one disconnects.
        return await asyncio.shield(self._page)

    async def _new_page(self) -> bytes:
        start = time.monotonic()
        page = await asyncio.to_thread(self._render, *self._counts())
        end = time.monotonic()
        self._page_until = end + min(MAX_PAGE_SECONDS, PAGE_REUSE * (end - start))
        return page

    def _refresh(self) -> None:
        """Set the gauges. Requests without a token are waiting, but at most as many as the nodes
        report; the others are being prefilled."""
        work = self.work()
        if model := self.served_model():
            self.requests[model] += 0
        for model, requests in self.requests.items():
            waiting = min(self.unstarted[model], work.waiting)
            self.vllm.gauge("num_requests_waiting", model).set(waiting)
            self.vllm.gauge("num_requests_running", model).set(requests - waiting)
            self.vllm.gauge("kv_cache_usage_perc", model).set(work.kv_usage)
        blocks: Counts[int] = Counts()
        for node in self._nodes:
            if not node.is_prefill and node.load.block_size:
                blocks[node.load.block_size] += node.load.total_blocks
        self.vllm.cache_config.blocks = dict(blocks)

    def _counts(self) -> tuple[list[NodeCounts], Counts[tuple[str, str]]]:
        self._refresh()
        return count_nodes(self._nodes, self._nodes.now()), self._nodes.absent.tally()

    def _render(self, counts: Sequence[NodeCounts], absent: Counts[tuple[str, str]]) -> bytes:
        return generate_latest(self.registry) + text(counts, absent).encode()
