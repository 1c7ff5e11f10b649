"""Mean, deviation and percentiles, as numpy computes them, without numpy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import floor


def mean(values: Sequence[float]) -> float:
    """0 of nothing, as vLLM has it."""
    return statistics.fmean(values) if values else 0.0


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of all values, not of a sample."""
    if not values:
        return 0.0
    middle = statistics.fmean(values)
    return float(statistics.fmean((value - middle) ** 2 for value in values) ** 0.5)


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated linearly between the two values around it."""
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
    """99 for 99.0, and 99.9 for 99.9."""
    return str(int(percent)) if int(percent) == percent else str(percent)
