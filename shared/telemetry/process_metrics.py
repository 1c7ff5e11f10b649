"""What every process shows of itself: build, resources, event loop, certificates."""

from __future__ import annotations

import asyncio
import logging
import math
import platform
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata

from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..security.credentials import INSECURE, Credentials
from ..version import version

log = logging.getLogger("tandem.process")

LAG_SECONDS = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0)
DAY = 86400.0
# An authority that renews by itself has done so by then.
SOON_SECONDS = 14 * DAY
EXPIRY = "tandem_certificate_expiry_timestamp_seconds"
# How often the lag is measured: a loop that stands still is seen however short the pause is.
PAUSE_SECONDS = 0.25


class ProcessMetrics:
    """Adds its series to ``registry``; ``watch`` measures the loop that runs it."""

    def __init__(self, registry: CollectorRegistry, credentials: Credentials = INSECURE) -> None:
        self._credentials = credentials
        ProcessCollector(registry=registry)
        registry.register(_Certificates(credentials))
        build = Gauge(
            "tandem_build_info",
            "1, with what runs as labels.",
            ("version", "python", "torch"),
            registry=registry,
        )
        build.labels(version(), platform.python_version(), _installed("torch")).set(1)
        self._lag = Histogram(
            "tandem_event_loop_lag_seconds",
            "How late the event loop ran what was due.",
            buckets=LAG_SECONDS,
            registry=registry,
        )

    async def watch(self) -> None:
        """Runs for ever; also warns each day of certificates that end soon."""
        warned_at = -math.inf
        while True:
            due = time.monotonic() + PAUSE_SECONDS
            await asyncio.sleep(PAUSE_SECONDS)
            self._lag.observe(max(0.0, time.monotonic() - due))
            if due - warned_at >= DAY:
                warned_at = due
                self._warn(time.time())

    def _warn(self, now: float) -> None:
        for flag, ends in self._credentials.expiries().items():
            if ends - now < SOON_SECONDS:
                told = datetime.fromtimestamp(ends, UTC).isoformat(timespec="minutes")
                log.warning("a certificate of %s ends at %s; replace the file", flag, told)


class _Certificates(Collector):
    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            EXPIRY,
            "When the first certificate of a file ends, as Unix time.",
            labels=["file"],
        )
        for flag, ends in self._credentials.expiries().items():
            family.add_metric([flag], ends)
        yield family


def _installed(package: str) -> str:
    """Its version, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
