"""Series and log lines that every process has."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tandem.shared.security.credentials import INSECURE, read_credentials
from tandem.shared.telemetry.process_metrics import DAY, SOON_SECONDS, ProcessMetrics
from tandem.tests.support.certificates import issue


async def test_a_blocked_loop_shows_in_the_metrics() -> None:
    registry = CollectorRegistry()
    watching = asyncio.create_task(ProcessMetrics(registry).watch())
    await asyncio.sleep(0)  # it waits now
    time.sleep(0.4)  # noqa: ASYNC251 - what is measured
    count = "tandem_event_loop_lag_seconds_count"
    async with asyncio.timeout(10):
        while not registry.get_sample_value(count):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (registry.get_sample_value("tandem_event_loop_lag_seconds_sum") or 0.0) > 0.1
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(SOON_SECONDS - DAY, True), (SOON_SECONDS + DAY, False)]
)
def test_certificates_that_end_soon_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seconds: float, expected: bool
) -> None:
    caplog.set_level(logging.INFO, "tandem")
    credentials = read_credentials(issue(tmp_path, "127.0.0.1").config())
    first = min(credentials.expiries().values())
    ProcessMetrics(CollectorRegistry(), credentials)._warn(first - seconds)
    assert ("a certificate of --tls-" in caplog.text) is expected
    ProcessMetrics(CollectorRegistry(), INSECURE)._warn(first)
