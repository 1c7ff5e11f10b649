"""Times at which requests are sent: planned in advance, and independent of the responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, pow
from random import Random

from ..shared.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A rate in requests per second and its regularity, or a rate that grows from first to last.

    ``burstiness`` 1 is a Poisson process, less is burstier, infinity is perfectly regular.
    """

    request_rate: float = inf
    burstiness: float = 1.0
    ramp_up: str | None = None
    first_rate: int | None = None
    last_rate: int | None = None

    def __post_init__(self) -> None:
        """Raise ``UsageError`` for contradictory options."""
        if self.ramp_up is None:
            return
        if self.request_rate != inf:
            raise UsageError("--ramp-up-strategy sets the rate; leave out --request-rate")
        if self.first_rate is None or self.last_rate is None:
            raise UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        if self.first_rate > self.last_rate:
            raise UsageError(
                f"--ramp-up-start-rps {self.first_rate} is more than --ramp-up-end-rps "
                f"{self.last_rate}"
            )
        if self.first_rate == 0:
            raise UsageError("--ramp-up-start-rps must be at least 1: at 0 no request is ever sent")

    @property
    def paced(self) -> bool:
        """False if all requests are sent at once."""
        return self.ramp_up is not None or self.request_rate != inf

    def rate(self, index: int, count: int) -> float:
        """Requests per second when request ``index`` of ``count`` is sent."""
        if self.ramp_up is None or self.first_rate is None or self.last_rate is None:
            return self.request_rate
        progress = index / max(count - 1, 1)
        if self.ramp_up == "linear":
            return self.first_rate + (self.last_rate - self.first_rate) * progress
        return self.first_rate * pow(self.last_rate / self.first_rate, progress)


def arrival_times(traffic: Traffic, count: int, seed: int) -> Sequence[float]:
    """Seconds from the start at which each request is sent. At a constant rate the last one is sent
    exactly at its expected time, as in vLLM, so that seeds differ less."""
    if not traffic.paced:
        return [0.0] * count
    random = Random(seed)
    gaps = [_gap(random, traffic.rate(index, count), traffic.burstiness) for index in range(count)]
    times = list(accumulate(gaps))
    if traffic.ramp_up is None and times and times[-1] > 0:
        scale = count / traffic.request_rate / times[-1]
        times = [time * scale for time in times]
    return times


def _gap(random: Random, rate: float, burstiness: float) -> float:
    if burstiness == inf:
        return 1 / rate
    return random.gammavariate(burstiness, 1 / (rate * burstiness))
