"""The share of the cores that other processes took during a measurement."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil


class Neighbours:
    """CPU use on ``cores`` by processes other than this one and its children, since
    construction."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = tuple(cores)
        self._start = time.monotonic()
        self._busy, self._own = self._busy_seconds(), _own_seconds()

    def share(self) -> float:
        """0 on a quiet machine, 1 when others had all of the cores. Time that a hypervisor took
        counts as theirs."""
        elapsed = time.monotonic() - self._start
        others = self._busy_seconds() - self._busy - (_own_seconds() - self._own)
        return max(0.0, others) / (elapsed * len(self._cores))

    def _busy_seconds(self) -> float:
        times = psutil.cpu_times(percpu=True)
        return sum(sum(times[core]) - _idle(times[core]) for core in self._cores)


def _idle(times: tuple[float, ...]) -> float:
    """Idle seconds, waits for disks among them; guests' time is in user time already."""
    names = ("idle", "iowait", "guest", "guest_nice")
    return sum(getattr(times, name, 0.0) for name in names)


def _own_seconds() -> float:
    own = psutil.Process()
    family = [own, *own.children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in family)
