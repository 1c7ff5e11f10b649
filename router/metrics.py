"""The router's metrics page: its own series under vLLM's names, and a few of each node."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

from ..shared.telemetry.stats_line import Work
from ..shared.telemetry.tracing import current
from .cluster.node_table import NodeTable
from .generation import ChoiceDelta, GenerationRequest, Output, Usage
from .http.access_log import AccessRecord, prefill_origin
from .telemetry.node_series import NodeCounts, count_nodes, text
from .telemetry.vllm_series import FIRST_TOKEN, VllmSeries

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# By our names of finish reasons; others are the same.
FINISHED_REASONS = {"tool_calls": "stop"}
ABORTED = "abort"
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
        # The served model, whose gauges are shown before its first request; autoscalers need them.
        self.served: Callable[[], str] = lambda: ""
        self.requests: Counts[str] = Counts()  # in progress, by model
        self.unstarted: Counts[str] = Counts()  # of these, without a token
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
            "Of the prompt tokens of finished requests, those that decode nodes had in their "
            "prefix index.",
            ("model_name",),
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
        """The router's work, with the queues and caches of its decode nodes."""
        loads = [node.load for node in self._nodes if not node.is_prefill]
        blocks = sum(load.total_blocks for load in loads)
        taken = sum(load.owned_blocks + load.reserved_blocks for load in loads)
        return Work(
            prompt_tokens=self.vllm.total("prompt_tokens"),
            generated_tokens=self.vllm.total("generation_tokens"),
            cache_queries=self.vllm.total("prefix_cache_queries"),
            cache_hits=self.vllm.total("prefix_cache_hits"),
            running=self.requests.total(),
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

    async def page_with(self, series: Callable[[CollectorRegistry], bytes]) -> bytes:
        """The page with ``series`` of this registry in place of its own, rendered in a thread."""
        counts, absent = self._counts()
        return await asyncio.to_thread(
            lambda: series(self.registry) + text(counts, absent).encode()
        )

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

    def _refresh(self) -> None:
        """Set the gauges. A request waits until it has a token, unless the nodes report that fewer
        wait: the others are being prefilled."""
        work = self.work()
        if served := self.served():
            self.requests[served] += 0
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


class RequestMetrics:
    """Times and counts one request; a context manager around the time it is in progress."""

    def __init__(self, metrics: Metrics, request: GenerationRequest, access: AccessRecord) -> None:
        self._metrics = metrics
        self._access = access
        access.model = self._name = request.model.name
        access.prompt_tokens = request.prompt_tokens
        self._gaps = metrics.vllm.token_gaps.of(self._name)
        self._tokens = metrics.vllm.counter("generation_tokens", self._name)
        self._request = request
        self._start = 0.0
        self._first: dict[int, float] = {}  # by choice, as the others
        self._last: dict[int, float] = {}
        self._counts: Counts[int] = Counts()
        self._finished = 0

    def __enter__(self) -> RequestMetrics:
        self._start = self._access.begun = time.monotonic()
        self._metrics.requests[self._name] += 1
        self._metrics.unstarted[self._name] += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, (asyncio.CancelledError, GeneratorExit)):
            unfinished = self._request.choices - self._finished
            self._metrics.vllm.counter("request_success", self._name, ABORTED).inc(unfinished)
        self._metrics.requests[self._name] -= 1
        self._metrics.unstarted[self._name] -= not self._last
        for served in self._access.usage.served.values():
            if served.computed.prompt_tokens:
                self._metrics.prompts.labels(*prefill_origin(served)).inc()

    def count(self, output: Output) -> None:
        """Observe an output when it is written."""
        if isinstance(output, ChoiceDelta):
            self._count_delta(output)

    def finish(self, usage: Usage) -> None:
        """Observe the end of the request, when every choice has finished."""
        self._observe("e2e_request_latency_seconds", time.monotonic() - self._start)
        self._observe(
            "request_prefill_kv_computed_tokens", max(0, usage.prompt_tokens - usage.cached_tokens)
        )
        self._metrics.count_sources(self._name, usage)
        self._observe_sizes()
        self._observe_phases()

    def _observe(self, name: str, value: float) -> None:
        self._metrics.vllm.histogram(name, self._name).observe(value)

    def _observe_sizes(self) -> None:
        request = self._request
        for prompt, most in zip(request.prompts, request.max_tokens, strict=True):
            self._observe("request_prompt_tokens", len(prompt.tokens))
            self._observe("request_params_max_tokens", most)
        self._observe("request_params_n", request.n)
        self._observe("request_max_num_generation_tokens", max(self._counts.values(), default=0))

    def _observe_phases(self) -> None:
        """Observe the phases of a request with one prompt; of several, it is unknown whose a phase
        is."""
        phases = self._access.phases()
        if not phases or not self._last:
            return
        queue = phases.get("queue", 0.0)
        prefill = sum(spent for name, spent in phases.items() if name not in ("router", "queue"))
        decode = max(self._last.values()) - min(self._first.values())
        self._observe("request_queue_time_seconds", queue)
        self._observe("request_prefill_time_seconds", prefill)
        self._observe("request_decode_time_seconds", decode)
        self._observe("request_inference_time_seconds", prefill + decode)

    def _count_delta(self, delta: ChoiceDelta) -> None:
        if delta.tokens:
            self._count_tokens(delta.index, len(delta.tokens), time.monotonic())
        if delta.finish_reason is not None:
            reason = FINISHED_REASONS.get(delta.finish_reason, delta.finish_reason)
            self._metrics.vllm.counter("request_success", self._name, reason).inc()
            self._finished += 1
            self._access.finish_reasons[delta.finish_reason] += 1
            self._count_choice(delta.index)

    def _count_tokens(self, index: int, count: int, now: float) -> None:
        last = self._last.get(index)
        if last is not None:
            self._gaps.observe(now - last, count)
        else:
            if not self._last:
                self._count_first(now)
            self._first[index] = now
        self._last[index] = now
        self._counts[index] += count
        self._tokens.inc(count)
        self._access.output_tokens += count

    def _count_first(self, now: float) -> None:
        """Observe the first token of the request."""
        self._metrics.unstarted[self._name] -= 1
        self._observe("time_to_first_token_seconds", now - self._start)
        self._access.first_token_seconds = round(now - self._start, 4)
        current().event("first token")
        phases = self._access.phases()
        current().set(**{f"first_token_{name}": spent for name, spent in phases.items()})
        for name, spent in phases.items():
            self._metrics.phases.labels(name).observe(spent)

    def _count_choice(self, index: int) -> None:
        """Observe a choice that has finished."""
        count = self._counts[index]
        self._observe("request_generation_tokens", count)
        if count > 1:
            mean = (self._last[index] - self._first[index]) / (count - 1)
            self._observe("request_time_per_output_token_seconds", mean)
