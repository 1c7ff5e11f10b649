"""Metrics of any process: build, resources, event loop lag, certificate expiry."""

from __future__ import annotations

import asyncio
import logging
import math
import platform
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from importlib import metadata

from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..process.queued_stderr import dropped_lines
from ..security.credentials import INSECURE, Credentials
from ..version import version

log = logging.getLogger("tandem.process")

LAG_SECONDS = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0)
DAY = 86400.0
# Warn this long before a certificate expires; automatic renewal happens earlier.
SOON_SECONDS = 14 * DAY
EXPIRY = "tandem_certificate_expiry_timestamp_seconds"
DROPPED = "tandem_log_lines_dropped"
# Interval of lag measurements.
PAUSE_SECONDS = 0.25


class ProcessMetrics:
    """Adds its series to ``registry``; ``watch`` measures the running event loop."""

    def __init__(self, registry: CollectorRegistry, credentials: Credentials = INSECURE) -> None:
        self._credentials = credentials
        ProcessCollector(registry=registry)
        registry.register(_Certificates(credentials))
        registry.register(_DroppedLines())
        build = Gauge(
            "tandem_build_info",
            "Always 1; the labels identify the build.",
            ("version", "python", "torch"),
            registry=registry,
        )
        build.labels(version(), platform.python_version(), _installed("torch")).set(1)
        self._lag = Histogram(
            "tandem_event_loop_lag_seconds",
            "Delay of callbacks that were due on the event loop.",
            buckets=LAG_SECONDS,
            registry=registry,
        )

    async def watch(self) -> None:
        """Measure until cancelled; also warn once a day about certificates that expire soon."""
        warned_at = -math.inf
        while True:
            due = time.monotonic() + PAUSE_SECONDS
            await asyncio.sleep(PAUSE_SECONDS)
            self._lag.observe(max(0.0, time.monotonic() - due))
            if due - warned_at >= DAY:
                warned_at = due
                self._warn(time.time())

    def _warn(self, now: float) -> None:
        for flag, expiry in self._credentials.expiries().items():
            if expiry - now < SOON_SECONDS:
                date = datetime.fromtimestamp(expiry, UTC).isoformat(timespec="minutes")
                log.warning("a certificate of %s expires at %s; replace the file", flag, date)


class _Certificates(Collector):
    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            EXPIRY,
            "Expiry of the first certificate of a file to expire, as Unix time.",
            labels=["file"],
        )
        for flag, expiry in self._credentials.expiries().items():
            family.add_metric([flag], expiry)
        yield family


class _DroppedLines(Collector):
    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            DROPPED,
            "Lines of this process's log that could not be written: its reader was too slow, or "
            "the disk full.",
            value=dropped_lines(),
        )


@cache
def _installed(package: str) -> str:
    """The version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
