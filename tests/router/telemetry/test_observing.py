"""Where a router's metrics are served, and its log line about throughput."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.router.options import RouterOptions
from tandem.router.server import Router
from tandem.shared.errors import StartupError, UsageError
from tandem.shared.security.credentials import read_credentials
from tandem.shared.telemetry import stats_line
from tandem.shared.telemetry.stats_line import Work, rates
from tandem.tests.router.support import cluster, until
from tandem.tests.support.certificates import issue


async def page(url: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.get(url)


async def test_metrics_have_a_port_of_their_own_without_a_key(tmp_path: Path) -> None:
    async with cluster(tmp_path, api_key="secret", metrics_port=0) as c:
        text = await page(f"http://127.0.0.1:{c.router.metrics_port}/metrics")
        assert text.status_code == 200 and "tandem_nodes{" in text.text
        headers = {"authorization": "Bearer secret"}
        response = await c.client.get("/metrics", headers=headers)
        assert response.status_code == 404 and "--metrics-port" in response.text
        ready = await page(f"http://127.0.0.1:{c.router.metrics_port}/ready")
        assert ready.status_code == 200


async def test_without_a_port_of_their_own_a_key_hides_them(tmp_path: Path) -> None:
    async with cluster(tmp_path, api_key="secret") as c:
        for headers in ({}, {"authorization": "Bearer secret"}):
            response = await c.client.get("/metrics", headers=headers)
            assert response.status_code == 404 and "--metrics-port" in response.text
    async with cluster(tmp_path) as c:
        assert (await c.client.get("/metrics")).status_code == 200


async def test_a_metrics_port_in_use_is_named(tmp_path: Path) -> None:
    async with cluster(tmp_path, metrics_port=0) as c:
        options = RouterOptions(port=0, registry_port=0, metrics_port=c.router.metrics_port)
        with pytest.raises(StartupError, match="--metrics-port"):
            await Router(options).start()
    with pytest.raises(UsageError, match="--metrics-host needs --metrics-port"):
        RouterOptions(metrics_host="0.0.0.0")


async def test_the_page_has_the_process_and_its_certificates(tmp_path: Path) -> None:
    papers = issue(tmp_path / "papers", "127.0.0.1")
    router = Router(
        RouterOptions(port=0, registry_port=0), credentials=read_credentials(papers.config())
    )
    text = router.metrics.render().decode()
    for series in (
        "tandem_build_info{",
        "process_resident_memory_bytes ",
        "process_cpu_seconds_total ",
        "process_open_fds ",
        "tandem_event_loop_lag_seconds_count ",
        'tandem_certificate_expiry_timestamp_seconds{file="--tls-cert"}',
        'tandem_certificate_expiry_timestamp_seconds{file="--tls-ca"}',
    ):
        assert f"\n{series}" in text, series
    await router.app.close()


async def test_keys_may_come_from_a_file_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.shared.security.watched_files.CHECK_SECONDS", 0.0)
    file = tmp_path / "keys"
    file.write_text("first\n\n second \n")
    async with cluster(tmp_path, api_key="fixed", api_key_file=str(file)) as c:

        async def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await c.client.get("/v1/models", headers=headers)).status_code

        assert [await status(key) for key in ("first", "second", "fixed", "none")] == [200] * 3 + [
            401
        ]
        file.write_text("third\n")
        assert [await status(key) for key in ("first", "third", "fixed")] == [401, 200, 200]
        file.write_text("\n")
        assert [await status(key) for key in ("none", "third")] == [401, 200], "as it was before"
    with pytest.raises(StartupError, match="has no key, so every client would be allowed"):
        Router(RouterOptions(port=0, registry_port=0, api_key_file=str(file)))


IDLE = Work(
    prompt_tokens=100,
    generated_tokens=50,
    cache_queries=100,
    cache_hits=20,
    running=0,
    waiting=0,
    transfers=0,
    kv_usage=0.25,
)


def work(**changes: Any) -> Work:
    return replace(IDLE, **changes)


def test_a_pace_is_between_two_moments() -> None:
    now = work(prompt_tokens=300, generated_tokens=90, cache_queries=300, cache_hits=70, running=2)
    assert str(rates(IDLE, now, 10.0)) == (
        "prompt 20.0 tokens/s, generation 4.0 tokens/s, running 2, waiting 0, KV usage 25.0%, "
        "prefix hits 25.0%, transfers 0"
    )
    assert "prefix" not in str(rates(IDLE, work(running=1), 10.0))


def test_an_idle_process_logs_nothing() -> None:
    assert rates(IDLE, IDLE, 10.0) is None
    for change in ({"waiting": 1}, {"transfers": 1}, {"generated_tokens": 51}):
        assert rates(IDLE, work(**change), 10.0) is not None


async def test_a_router_logs_its_throughput_while_it_has_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tandem")
    async with cluster(tmp_path, stats_interval=0.05) as c:
        await c.complete("hello")
        # The first line may come before the request has generated anything.
        await until(lambda: any(line["generated_tokens_per_second"] for line in lines(caplog)))
    assert [stats_line.Rates(**line) for line in lines(caplog)]


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(r)["fields"] for r in caplog.records if "tokens/s" in r.getMessage()]
