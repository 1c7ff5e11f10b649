"""Engine metrics."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ..engine.core import EngineCore
from ..engine.counters import STEP_TOKENS
from ..engine.plan import COMPUTATION, NOT_FINITE, OUT_OF_MEMORY

QUEUE_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
# Labels of the series with vLLM's names that only a node can report; the router has the others.
_LABELS = ("model_name", "engine")
_ENGINE = "0"
PREEMPTIONS = "Sequences that gave their blocks back to be computed again."
_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


class EngineCollector(Collector):
    """Metrics read from the engine at each scrape."""

    def __init__(self, core: EngineCore, model_name: str = "") -> None:
        self._core = core
        self._labels = (model_name, _ENGINE)

    def collect(self) -> Iterator[Metric]:
        for kind, name, text, value in self._series():
            yield kind(name, text, value)
        yield from self._vllm_series()
        counters = self._core.counters
        yield _by_cause(
            "tandem_engine_steps_failed",
            "Steps that raised. Their sequences were tried again one by one.",
            {
                cause: self._core.counters.failed_steps[cause]
                for cause in (OUT_OF_MEMORY, COMPUTATION)
            },
        )
        causes = (OUT_OF_MEMORY, COMPUTATION, NOT_FINITE)
        yield _by_cause(
            "tandem_sequences_failed",
            "Sequences that ended because their step failed.",
            {cause: counters.failed_sequences[cause] for cause in causes},
        )

    def _vllm_series(self) -> Iterator[Metric]:
        load, counters = self._core.load(), self._core.counters
        preemptions = CounterMetricFamily("vllm:num_preemptions", PREEMPTIONS, labels=_LABELS)
        preemptions.add_metric(self._labels, load.preemptions)
        yield preemptions
        tokens = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens of a step.", labels=_LABELS
        )
        bounds = (*(str(float(bound)) for bound in STEP_TOKENS), "+Inf")
        buckets = list(zip(bounds, accumulate(counters.step_tokens), strict=True))
        total = counters.prompt_tokens + counters.generated_tokens
        tokens.add_metric(self._labels, buckets, total)
        yield tokens

    def _series(self) -> Iterator[tuple[_Kind, str, str, float]]:
        core, load, counters = self._core, self._core.load(), self._core.counters
        for name, text, value in (
            ("tandem_sequences_running", "Sequences in the batch.", load.running),
            ("tandem_sequences_waiting", "Sequences not yet running.", load.waiting),
            (
                "tandem_prefill_queue_tokens",
                "Prompt tokens to compute.",
                load.queued_prefill_tokens,
            ),
            (
                "tandem_prefill_tokens_per_second",
                "Measured rate of prompt tokens; 0 until known.",
                core.prefill_tokens_per_second,
            ),
            ("tandem_kv_usage_ratio", "KV blocks owned or reserved, of all.", load.kv_usage),
        ):
            yield GaugeMetricFamily, name, text, value
        for name, text, value in (
            ("tandem_engine_steps", "Steps.", counters.steps),
            ("tandem_engine_step_seconds", "Time spent in steps.", counters.step_seconds),
            ("tandem_engine_prompt_tokens", "Prompt tokens computed here.", counters.prompt_tokens),
            ("tandem_engine_generated_tokens", "Tokens sampled.", counters.generated_tokens),
            (
                "tandem_prefix_cache_queries",
                "Prompt tokens looked up in the prefix index.",
                counters.cache_queries,
            ),
            (
                "tandem_prefix_cache_hits",
                "Prompt tokens found in the prefix index.",
                counters.cache_hits,
            ),
            ("tandem_preemptions", PREEMPTIONS, load.preemptions),
        ):
            yield CounterMetricFamily, name, text, value


def _by_cause(name: str, text: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["cause"])
    for cause, count in counts.items():
        family.add_metric([cause], count)
    return family
