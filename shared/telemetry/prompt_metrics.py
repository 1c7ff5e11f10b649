"""Counts of a decode node's prompts by where they were prefilled: in total, and recently."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PROMPTS = "tandem_prompts_total"
RECENT = "tandem_prompts_recent"
RECENT_SECONDS = 300.0
# Step by which the window of recent prompts advances.
STEP_SECONDS = 30.0

_Key = tuple[str, str]


class PromptMetrics(Collector):
    """Both series, with the labels of ``prefill_origin.py``."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._all = Counter(
            PROMPTS,
            "Prompts of a decode node, by where they were prefilled and why not elsewhere.",
            ["where", "reason"],
            registry=registry,
        )
        self._steps: deque[tuple[float, Tally[_Key]]] = deque()
        registry.register(self)

    def count(self, where: str, reason: str = "") -> None:
        """Count one prompt."""
        self._all.labels(where, reason).inc()
        now = self._clock()
        if not self._steps or now - self._steps[-1][0] >= STEP_SECONDS:
            self._steps.append((now, Tally()))
            self._forget(now)
        self._steps[-1][1][where, reason] += 1

    def describe(self) -> tuple[Metric, ...]:
        return (self._family(),)

    def collect(self) -> Iterator[Metric]:
        self._forget(self._clock())
        recent: Tally[_Key] = sum((tally for _, tally in self._steps), Tally())
        family = self._family()
        for key, count in recent.items():
            family.add_metric(key, count)
        yield family

    def _forget(self, now: float) -> None:
        while self._steps and now - self._steps[0][0] >= RECENT_SECONDS:
            self._steps.popleft()

    def _family(self) -> GaugeMetricFamily:
        meaning = f"The same for the last {RECENT_SECONDS:.0f} s."
        return GaugeMetricFamily(RECENT, meaning, labels=["where", "reason"])
