"""The router's metrics page: its own series under vLLM's names, and a few of each node."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections.abc import Callable, Sequence

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
TOKENS = tuple(mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5))
COUNT = (1, 2, 5, 10, 20)
# Histograms of requests under vLLM's names: name, meaning, buckets.
OF_REQUESTS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("request_prompt_tokens", "Tokens of a prompt.", TOKENS),
    ("request_generation_tokens", "Tokens of a choice.", TOKENS),
    ("request_max_num_generation_tokens", "Tokens of a request's longest choice.", TOKENS),
    ("request_params_n", "Choices that a request asks for.", COUNT),
    ("request_params_max_tokens", "Tokens that a choice may have.", TOKENS),
    ("request_time_per_output_token_seconds", "Mean time between tokens of a choice.", BETWEEN),
    ("request_queue_time_seconds", "Time of a prompt in the queues of nodes.", WHOLE),
    ("request_prefill_time_seconds", "From the end of the queue to the first token.", WHOLE),
    ("request_decode_time_seconds", "From the first token to the last.", WHOLE),
    ("request_inference_time_seconds", "From the end of the queue to the last token.", WHOLE),
)
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
        self._add_gauges()
        self._add_times()
        self._add_counts()
        self._add_sources()
        self.of_requests = {
            name: Histogram(f"vllm:{name}", text, LABEL, buckets=buckets, registry=self.registry)
            for name, text, buckets in OF_REQUESTS
        }

    def _add_gauges(self) -> None:
        own = self.registry
        self._running = Gauge(
            "vllm:num_requests_running", "Requests that nodes compute.", LABEL, registry=own
        )
        self._waiting = Gauge(
            "vllm:num_requests_waiting",
            "Requests in progress that no node computes yet, by the last heartbeats.",
            LABEL,
            registry=own,
        )
        self._kv_usage = Gauge(
            "vllm:kv_cache_usage_perc",
            "KV blocks of decode nodes owned or reserved, of all: 0 to 1.",
            LABEL,
            registry=own,
        )

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

    def _add_sources(self) -> None:
        own = self.registry
        self.by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens of finished requests by where their KV came from.",
            (*LABEL, "source"),
            registry=own,
        )
        self.queries, self.hits, self.external_queries, self.external_hits, self.prompt_cached = (
            Counter(f"vllm:{name}", text, LABEL, registry=own)
            for name, text in (
                ("prefix_cache_queries", "Prompt tokens looked up in prefix indexes."),
                ("prefix_cache_hits", "Of these, the tokens found."),
                ("external_prefix_cache_queries", "Prompt tokens that decode nodes lacked."),
                ("external_prefix_cache_hits", "Of these, the tokens from prefill nodes."),
                ("prompt_tokens_cached", "Prompt tokens found, or received from prefill nodes."),
            )
        )

    def count_sources(self, model: str, usage: Usage) -> None:
        """Count where the KV of a finished request came from."""
        missing = usage.prompt_tokens - usage.cached_tokens
        self.queries.labels(model).inc(usage.prompt_tokens)
        self.hits.labels(model).inc(usage.cached_tokens)
        self.external_queries.labels(model).inc(max(0, missing))
        self.external_hits.labels(model).inc(usage.remote_tokens)
        self.prompt_cached.labels(model).inc(usage.cached_tokens + usage.remote_tokens)
        for source, tokens in (
            ("local_compute", max(0, missing - usage.remote_tokens)),
            ("local_cache_hit", usage.cached_tokens),
            ("external_kv_transfer", usage.remote_tokens),
        ):
            self.by_source.labels(model, source).inc(tokens)

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
            self._waiting.labels(model).set(waiting)
            self._running.labels(model).set(requests - waiting)
            self._kv_usage.labels(model).set(work.kv_usage)

    def _counts(self) -> tuple[list[NodeCounts], Counts[tuple[str, str]]]:
        self._refresh()
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
        self._request = request
        self._start = 0.0
        self._first: dict[int, float] = {}  # by choice, as the others
        self._last: dict[int, float] = {}
        self._counts: Counts[int] = Counts()

    def __enter__(self) -> RequestMetrics:
        self._start = self._access.begun = time.monotonic()
        self._metrics.requests[self._name] += 1
        self._metrics.unstarted[self._name] += 1
        return self

    def __exit__(self, *_: object) -> None:
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
        self._metrics.whole.labels(self._name).observe(time.monotonic() - self._start)
        self._metrics.prompt_tokens.labels(self._name).inc(usage.prompt_tokens)
        self._metrics.cached_tokens.labels(self._name).inc(usage.cached_tokens)
        self._metrics.count_sources(self._name, usage)
        self._observe_sizes()
        self._observe_phases()

    def _observe(self, name: str, value: float) -> None:
        self._metrics.of_requests[name].labels(self._name).observe(value)

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
            self._metrics.success.labels(self._name, delta.finish_reason).inc()
            self._access.finish_reasons[delta.finish_reason] += 1
            self._count_choice(delta.index)

    def _count_tokens(self, index: int, count: int, now: float) -> None:
        last = self._last.get(index)
        if last is not None:
            for _ in range(count):
                self._between.observe((now - last) / count)
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
        self._metrics.first_token.labels(self._name).observe(now - self._start)
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
