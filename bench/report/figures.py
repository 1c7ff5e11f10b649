"""Mean, deviation and percentiles, with numpy's results but without numpy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import floor


def mean(values: Sequence[float]) -> float:
    """The mean; 0 without values, as in vLLM."""
    return statistics.fmean(values) if values else 0.0


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a population, not of a sample."""
    if not values:
        return 0.0
    middle = statistics.fmean(values)
    return float(statistics.fmean((value - middle) ** 2 for value in values) ** 0.5)


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile, interpolated linearly between the two nearest values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = min(floor(position), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def percentiles(values: Sequence[float], percents: Sequence[float]) -> list[tuple[float, float]]:
    """Each percent with its value."""
    ordered = sorted(values)
    return [(percent, percentile(ordered, percent)) for percent in percents]


def percent_word(percent: float) -> str:
    """The number as text: 99 for 99.0, 99.9 for 99.9."""
    return str(int(percent)) if int(percent) == percent else str(percent)
