"""The metrics of one request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts

from ...shared.telemetry.tracing import current
from ..generation import ChoiceDelta, GenerationRequest, Output
from ..http.access_log import AccessRecord, prefill_origin
from ..usage import Timings, Usage
from .metrics import Metrics

# vLLM's names of finish reasons by ours, where they differ.
FINISHED_REASONS = {"tool_calls": "stop"}
ABORTED = "abort"


class RequestMetrics:
    """Measures one request; a context manager for the time that it is in progress."""

    def __init__(self, metrics: Metrics, request: GenerationRequest, access: AccessRecord) -> None:
        self._metrics = metrics
        self._access = access
        access.model = self._name = request.model.name
        self._gaps = metrics.vllm.token_gaps.of(self._name)
        self._tokens = metrics.vllm.counter("generation_tokens", self._name)
        self._request = request
        self._start = 0.0
        # By choice: times of the first and the last token, number of tokens, finish reason.
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._counts: Counts[int] = Counts()
        self._reasons: dict[int, str] = {}

    def __enter__(self) -> RequestMetrics:
        self._start = self._access.start = time.monotonic()
        self._metrics.requests[self._name] += 1
        self._metrics.unstarted[self._name] += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, (asyncio.CancelledError, GeneratorExit)):
            unfinished = self._request.choices - len(self._reasons)
            self._metrics.vllm.counter("request_success", self._name, ABORTED).inc(unfinished)
        self._metrics.requests[self._name] -= 1
        self._metrics.unstarted[self._name] -= not self._last
        served = self._access.usage.served
        origins = Counts(prefill_origin(one) for one in served if one.prefill.prompt_tokens)
        for origin, count in origins.items():
            self._metrics.prompts.labels(*origin).inc(count)

    def count(self, output: Output) -> None:
        """Observe an output when it is written."""
        if isinstance(output, ChoiceDelta):
            self._count_delta(output)

    def finish(self, usage: Usage) -> None:
        """Observe the end of a request whose choices have all finished, and set its timings."""
        usage.timings = self._timings()
        self._observe("e2e_request_latency_seconds", time.monotonic() - self._start)
        self._observe(
            "request_prefill_kv_computed_tokens", max(0, usage.prompt_tokens - usage.cached_tokens)
        )
        self._metrics.count_sources(self._name, usage)
        self._observe_sizes()
        self._observe_phases()

    def _timings(self) -> Timings | None:
        """The timings; ``None`` for a request without a token."""
        if not self._last:
            return None
        first, last = min(self._first.values()), max(self._last.values())
        gaps = sum(count - 1 for count in self._counts.values())
        seconds = sum(self._last[index] - self._first[index] for index in self._last)
        return Timings(
            queue=self._access.phases().get("queue", 0.0),
            first_token=first - self._start,
            generation=last - first,
            total=last - self._start,
            gap=seconds / gaps if gaps else None,
        )

    def _observe(self, name: str, value: float) -> None:
        self._metrics.vllm.histogram(name, self._name).observe(value)

    def _observe_sizes(self) -> None:
        request, histogram = self._request, self._metrics.vllm.histogram
        lengths = histogram("request_prompt_tokens", self._name)
        limits = histogram("request_params_max_tokens", self._name)
        for prompt, max_tokens in zip(request.prompts, request.max_tokens, strict=True):
            lengths.observe(len(prompt.tokens))
            limits.observe(max_tokens)
        self._observe("request_params_n", request.n)
        self._observe("request_max_num_generation_tokens", max(self._counts.values(), default=0))

    def _observe_phases(self) -> None:
        """Observe the phases, which are known only for a request with one prompt."""
        phases = self._access.phases()
        if not phases or not self._last:
            return
        queue = phases.get("queue", 0.0)
        prefill = sum(
            seconds for name, seconds in phases.items() if name not in ("router", "queue")
        )
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
            self._reasons[delta.index] = delta.finish_reason
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
        current().set(**{f"first_token_{name}": seconds for name, seconds in phases.items()})
        for name, seconds in phases.items():
            self._metrics.phases.labels(name).observe(seconds)

    def _count_choice(self, index: int) -> None:
        """Observe a choice that has finished."""
        count = self._counts[index]
        self._observe("request_generation_tokens", count)
        if count > 1:
            mean = (self._last[index] - self._first[index]) / (count - 1)
            self._observe("request_time_per_output_token_seconds", mean)
