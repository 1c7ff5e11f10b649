"""The router's series under vLLM's names, in one table.

Buckets include all of vLLM's, so that alerts about their bounds work, and finer ones below vLLM's
lowest, where Tandem is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from .token_gaps import TokenGaps

PREFIX = "vllm:"
LABELS = ("model_name", "engine")
# A router exports sums over all engines.
ENGINE = "0"
# fmt: off
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.16, 0.25, 0.32, 0.5, 0.64, 0.75,
    1, 1.25, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
BETWEEN = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3,
    0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
    960, 1920, 7680)
# fmt: on
TOKENS = tuple(mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5))
COUNT = (1, 2, 5, 10, 20)

BETWEEN_TOKENS = "inter_token_latency_seconds"

GAUGES = {
    "num_requests_running": "Requests that nodes are computing.",
    "num_requests_waiting": (
        "Requests in progress that no node computes yet, by the last heartbeats."
    ),
    "kv_cache_usage_perc": "Owned or reserved share of decode nodes' KV blocks, 0 to 1.",
}
# Help text, and labels in addition to ``LABELS``.
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_tokens": ("Prompt tokens of finished requests.", ()),
    "prompt_tokens_by_source": (
        "Prompt tokens of finished requests by where their KV came from.",
        ("source",),
    ),
    "prompt_tokens_cached": ("Prompt tokens found in a cache, or received from prefill nodes.", ()),
    "prefix_cache_queries": ("Prompt tokens looked up in prefix indexes.", ()),
    "prefix_cache_hits": ("Prompt tokens found in prefix indexes.", ()),
    "external_prefix_cache_queries": ("Prompt tokens not in caches of decode nodes.", ()),
    "external_prefix_cache_hits": ("Prompt tokens received from prefill nodes.", ()),
    "generation_tokens": ("Tokens generated.", ()),
    "request_success": (
        "Finished choices by reason; abort is a disconnected client or the deadline.",
        ("finished_reason",),
    ),
}
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of a choice.", TOKENS),
    "request_max_num_generation_tokens": ("Tokens of a request's longest choice.", TOKENS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens of a request not in a cache.",
        TOKENS,
    ),
    "request_params_n": ("Choices that a request asks for.", COUNT),
    "request_params_max_tokens": ("Maximum number of tokens of a choice.", TOKENS),
    "time_to_first_token_seconds": ("From the parsed request to its first output.", FIRST_TOKEN),
    BETWEEN_TOKENS: ("Time between two outputs of a choice, per token.", BETWEEN),
    "request_time_per_output_token_seconds": ("Mean time between tokens of a choice.", BETWEEN),
    "e2e_request_latency_seconds": ("From the parsed request to its end.", WHOLE),
    "request_queue_time_seconds": ("Time of a prompt in the queues of nodes.", WHOLE),
    "request_prefill_time_seconds": ("From the end of the queue to the first token.", WHOLE),
    "request_decode_time_seconds": ("From the first token to the last.", WHOLE),
    "request_inference_time_seconds": ("From the end of the queue to the last token.", WHOLE),
}


class VllmSeries:
    """All series of the tables, by name without the prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges = {
            name: Gauge(PREFIX + name, text, LABELS, registry=registry)
            for name, text in GAUGES.items()
        }
        self._counters = {
            name: Counter(PREFIX + name, text, (*LABELS, *labels), registry=registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(PREFIX + name, text, LABELS, buckets=buckets, registry=registry)
            for name, (text, buckets) in HISTOGRAMS.items()
            if name != BETWEEN_TOKENS
        }
        text, buckets = HISTOGRAMS[BETWEEN_TOKENS]
        self.token_gaps = TokenGaps(PREFIX + BETWEEN_TOKENS, text, LABELS, ENGINE, buckets)
        registry.register(self.token_gaps)
        self.cache_config = CacheConfig()
        registry.register(self.cache_config)

    def gauge(self, name: str, model: str) -> Gauge:
        return self._gauges[name].labels(model, ENGINE)

    def counter(self, name: str, model: str, *labels: str) -> Counter:
        return self._counters[name].labels(model, ENGINE, *labels)

    def histogram(self, name: str, model: str) -> Histogram:
        return self._histograms[name].labels(model, ENGINE)

    def total(self, name: str) -> float:
        """The sum of a counter over all labels."""
        samples = (s for family in self._counters[name].collect() for s in family.samples)
        return sum(s.value for s in samples if not s.name.endswith("_created"))


class CacheConfig(Collector):
    """``vllm:cache_config_info``, from which gateways read cache sizes. ``blocks`` is the number of
    the decode nodes' blocks by block size."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1; the labels have the tokens per block and the number of blocks.",
            labels=["engine", "block_size", "num_gpu_blocks"],
        )
        for size, blocks in self.blocks.items():
            info.add_metric([ENGINE, str(size), str(blocks)], 1)
        yield info
