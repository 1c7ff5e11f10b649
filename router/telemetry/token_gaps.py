"""A histogram of the times between tokens. It observes each token of each stream, three times as
fast as a histogram of prometheus_client."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class ModelGaps:
    """The gaps of one model. Observe in the event loop's thread only."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float, tokens: int) -> None:
        """Observe an output of ``tokens``, ``seconds`` after the last one."""
        self.counts[bisect_left(self._bounds, seconds / tokens)] += tokens
        self.seconds += seconds


class TokenGaps(Collector):
    """The gaps of all models, as one series with the labels model and engine."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], engine: str, bounds: Sequence[float]
    ) -> None:
        self._name, self._text, self._engine = name, text, engine
        self._labelnames = tuple(labels)  # prometheus_client's name for it
        self._bounds = bounds
        self._models: dict[str, ModelGaps] = {}

    def of(self, model: str) -> ModelGaps:
        return self._models.setdefault(model, ModelGaps(self._bounds))

    def describe(self) -> list[HistogramMetricFamily]:
        """The names, which the registry reserves."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._labelnames)]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        (family,) = self.describe()
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for model, gaps in tuple(self._models.items()):
            buckets = list(zip(names, accumulate(tuple(gaps.counts)), strict=True))
            family.add_metric([model, self._engine], buckets, gaps.seconds)
        yield family
