"""The metrics page: the series of nodes, and rendering without blocking the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.proto import tandem_pb2 as pb
from tandem.router.access.key_usage import MAX_NAMES, KeyUsage
from tandem.router.cluster.node_table import NodeTable
from tandem.router.telemetry import metrics as module
from tandem.router.telemetry.metrics import Metrics
from tandem.router.telemetry.node_series import SERIES
from tandem.tests.router.support import (
    Cluster,
    admitted,
    cluster,
    finished,
    held_briefly,
    tokens_event,
    until,
    usage,
)


def join(table: NodeTable, node_id: str, role: pb.Role = pb.ROLE_DECODE, **load: int) -> None:
    request = pb.JoinRequest(node_id=node_id, epoch=1, role=role, load=pb.Load(**load))  # type: ignore[arg-type]
    table.join(request, "127.0.0.1:9")


def samples(page: bytes) -> dict[tuple[str, str], float]:
    """Values by series and node."""
    return {
        (sample.name, sample.labels["node"]): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if "node" in sample.labels
    }


def test_a_handful_of_series_a_node_whatever_its_name() -> None:
    now = 100.0
    table = NodeTable(3.0, lambda: now)
    join(table, "plain", running=3, total_blocks=2**31)
    join(table, 'a "quoted" \\ name', pb.ROLE_PREFILL, queued_prefill_tokens=70)
    now += 1.5
    series = samples(Metrics(table).render())
    assert series["tandem_node_running", "plain"] == 3
    assert series["tandem_node_total_blocks", "plain"] == 2**31
    assert series["tandem_node_heartbeat_age_seconds", "plain"] == 1.5
    assert series["tandem_node_queued_prefill_tokens", 'a "quoted" \\ name'] == 70
    assert len(series) == 2 * (len(SERIES) + 2)


def test_nodes_are_counted_by_role_and_state() -> None:
    table = NodeTable(3.0)
    for name in "abc":
        join(table, name)
    next(iter(table)).drain()
    page = Metrics(table).render().decode()
    for line in ('"decode",state="ready"} 2', '"decode",state="draining"} 1', '"ready"} 0'):
        assert line in page


async def test_concurrent_scrapes_share_one_page_rendered_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    may_end = threading.Event()

    def slow(registry: Any) -> bytes:
        threads.append(threading.current_thread())
        assert may_end.wait(10)
        return b"made\n"

    monkeypatch.setattr(module, "generate_latest", slow)
    metrics = Metrics(NodeTable(3.0))
    scrapes = [asyncio.create_task(metrics.page()) for _ in range(3)]
    while not threads:  # noqa: ASYNC110 (a thread has no event of this loop)
        await asyncio.sleep(0.001)
    scrapes[0].cancel()  # the first client disconnects
    may_end.set()
    pages = await asyncio.gather(*scrapes, return_exceptions=True)
    assert isinstance(pages[0], asyncio.CancelledError)
    assert all(isinstance(page, bytes) and page.startswith(b"made") for page in pages[1:])
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


async def test_an_old_page_is_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_REUSE", 0.0)
    table = NodeTable(3.0)
    metrics = Metrics(table)
    assert not samples(await metrics.page())
    join(table, "a")
    assert samples(await metrics.page())


async def test_a_scrape_of_many_nodes_keys_and_models_holds_the_loop_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE_REUSE", 0.0)
    async with cluster(tmp_path) as c:
        for number in range(1000):
            join(c.router.nodes, f"decode-{number:04}-of-a-long-name", total_blocks=1000)
        for number in range(MAX_NAMES):
            c.router.app.services.usage.limited(f"key-{number}", "requests")
        for number in range(50):
            c.router.metrics.requests[f"model-{number}"] += 1
            c.router.metrics.vllm.token_gaps.of(f"model-{number}").observe(0.01, 1)
        response = await held_briefly(lambda: httpx.get(f"{c.url}/metrics", timeout=60))
        for line in ('node="decode-0999-', f'key="key-{MAX_NAMES - 1}"', 'model_name="model-49"'):
            assert line in response.text, line


def test_keys_that_are_first_seen_during_a_scrape_do_not_break_it() -> None:
    usage = KeyUsage()

    class Limited(Counter[str]):
        def items(self) -> Any:
            usage.limited("late", "tokens")
            return super().items()

    usage.of("early").limited = Limited()
    requests, *_ = usage.collect()
    assert [sample.labels["key"] for sample in requests.samples] == ["early"]
    assert set(usage.all()) == {"early", "late"}


async def test_sizes_times_and_sources_of_requests_under_vllms_names(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:

        async def script(request: Any, context: Any) -> Any:
            yield admitted()
            first_token = pb.FirstToken(
                queue_seconds=0.25, prefill_seconds=0.5, transfer_seconds=0.125
            )
            count = len(request.prompt)
            yield usage(request, cached_tokens=1, remote_tokens=count - 2, first_token=first_token)
            for index in range(2):
                yield tokens_event(index, [1, 2])
                yield tokens_event(index, [3] * index)
                yield finished(index)

        c.node.script = script
        response = await c.complete("hello world, hello world", n=2, max_tokens=9)
        prompt = response.json()["usage"]["prompt_tokens"]
        page = c.router.metrics.render().decode()
    for name, value in (
        ("num_requests_running", 0),
        ("num_requests_waiting", 0),
        ("kv_cache_usage_perc", 0),
        ("request_prompt_tokens_sum", prompt),
        ("request_generation_tokens_sum", 5),
        ("request_max_num_generation_tokens_sum", 3),
        ("request_params_n_sum", 2),
        ("request_prefill_kv_computed_tokens_sum", prompt - 1),
        ("request_params_max_tokens_sum", 9),
        ("request_time_per_output_token_seconds_count", 2),
        ("request_queue_time_seconds_sum", 0.25),
        ("request_prefill_time_seconds_sum", 0.625),
        ("request_decode_time_seconds_count", 1),
        ("request_inference_time_seconds_count", 1),
        ("prefix_cache_queries_total", prompt),
        ("prefix_cache_hits_total", 1),
        ("external_prefix_cache_queries_total", prompt - 1),
        ("external_prefix_cache_hits_total", prompt - 2),
        ("prompt_tokens_cached_total", prompt - 1),
    ):
        assert f'vllm:{name}{{engine="0",model_name="tiny"}} {float(value)}\n' in page, name
    for source, value in (
        ("local_compute", 1),
        ("local_cache_hit", 1),
        ("external_kv_transfer", prompt - 2),
    ):
        sample = (
            f'vllm:prompt_tokens_by_source_total{{engine="0",model_name="tiny",source="{source}"}}'
        )
        assert f"{sample} {float(value)}\n" in page


def registry_value(c: Cluster, name: str, labels: dict[str, str]) -> float | None:
    return c.router.metrics.registry.get_sample_value(name, labels)


async def test_a_request_waits_while_nodes_say_so_and_runs_with_its_first_token(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as c:
        talks = asyncio.Event()

        async def script(request: Any, context: Any) -> Any:
            yield admitted()
            await talks.wait()
            yield tokens_event(0, [1])
            await asyncio.Event().wait()

        def states() -> tuple[float, float]:
            c.router.metrics.render()
            registry = c.router.metrics.registry
            running, waiting = (
                registry.get_sample_value(
                    f"vllm:num_requests_{state}", {"model_name": "tiny", "engine": "0"}
                )
                for state in ("running", "waiting")
            )
            return running or 0.0, waiting or 0.0

        assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0' in (
            c.router.metrics.render().decode()
        ), "before the first request"
        c.node.script = script
        requests = [asyncio.create_task(c.complete("x")) for _ in range(3)]
        await until(lambda: c.node.active == 3)
        assert states() == (3, 0), "all are being prefilled"
        c.load = pb.Load(waiting=2)
        await until(lambda: states() == (1, 2))
        talks.set()
        await until(lambda: states() == (3, 0))
        for each in requests:
            each.cancel()
        await until(lambda: states() == (0, 0))
        assert not c.router.metrics.unstarted.total()
        labels = {"model_name": "tiny", "engine": "0", "finished_reason": "abort"}
        assert registry_value(c, "vllm:request_success_total", labels) == 3
