"""One page of metrics from several processes."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.router.access.key_usage import KeyCounts
from tandem.router.cluster.node_table import NodeTable
from tandem.router.processes import merged_metrics, merged_usage
from tandem.router.processes.merged_metrics import MergedPage, describe
from tandem.router.processes.merged_usage import MergedUsage, describe_usage, read_usage
from tandem.router.processes.process_link import Topic
from tandem.router.telemetry.metrics import Metrics


def worker(requests: int, seconds: float) -> bytes:
    metrics = Metrics(NodeTable(3.0))
    own: CollectorRegistry = metrics.registry
    Counter("tandem_key_requests", "Requests.", ["key"], registry=own).labels("a").inc(requests)
    Histogram("tandem_lag_seconds", "Lag.", buckets=(1,), registry=own).observe(seconds)
    Gauge("tandem_build_info", "Always 1.", registry=own).set(1)
    Gauge("process_open_fds", "Files.", registry=own).set(100 * requests)
    metrics.requests["m"] = metrics.unstarted["m"] = requests
    return describe(metrics)


async def test_each_series_is_there_once_with_the_sum() -> None:
    asked: list[Topic] = []

    async def gather(topic: Topic) -> dict[int, bytes]:
        asked.append(topic)
        return {0: worker(2, 0.5), 1: worker(3, 5.0)}

    metrics = Metrics(NodeTable(3.0))
    Gauge("tandem_build_info", "Always 1.", registry=metrics.registry).set(1)
    merged = MergedPage(metrics, gather)
    page = (await merged.get()).decode()
    assert await merged.get() == page.encode() and asked == [Topic.SERIES]
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    names = [line.rpartition(" ")[0] for line in lines]
    assert len(names) == len(set(names))
    for line in (
        'tandem_key_requests_total{key="a"} 5.0',
        'tandem_lag_seconds_bucket{le="1.0"} 1.0',
        "tandem_lag_seconds_count 2.0",
        "tandem_lag_seconds_sum 5.5",
        "tandem_build_info 1.0",
        "process_open_fds 300.0",
        'vllm:num_requests_running{engine="0",model_name="m"} 5.0',
        'tandem_nodes{role="decode",state="ready"} 0',
    ):
        assert line in lines, line
    assert await merged.most_open_files() == 300
    heads = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))


async def test_what_an_ended_worker_counted_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_metrics, "PAGE_SECONDS", 0.0)
    told = {0: worker(2, 0.5), 1: worker(3, 5.0)}

    async def gather(topic: Topic) -> dict[int, bytes]:
        return told

    merged = MergedPage(Metrics(NodeTable(3.0)), gather)

    async def counts() -> list[str]:
        lines = (await merged.get()).decode().splitlines()
        names = ("tandem_key_requests_total{", "tandem_lag_seconds_count", "vllm:num_requests_run")
        return [line.rpartition(" ")[2] for line in lines if line.startswith(names)]

    assert sorted(await counts()) == ["2.0", "5.0", "5.0"]
    del told[1]  # does not answer
    assert sorted(await counts()) == ["2.0", "2.0", "5.0"]
    merged.worker_ended(1)
    merged.worker_ended(1)
    assert sorted(await counts()) == ["2.0", "2.0", "5.0"]
    told[1] = worker(1, 0.1)  # its successor
    assert sorted(await counts()) == ["3.0", "3.0", "6.0"]


async def test_usage_is_summed_by_key_with_that_of_ended_workers() -> None:
    first, second = KeyCounts(requests=1, prompt_tokens=10), KeyCounts(requests=2)
    second.limited["tokens"] = 3
    told = {number: describe_usage({"a": each}) for number, each in enumerate((first, second))}

    async def gather(topic: Topic) -> dict[int, bytes]:
        return told

    merged = MergedUsage(gather)

    async def counts() -> tuple[int, int, int]:
        total = read_usage(await merged.get())["a"]
        return total.requests, total.prompt_tokens, total.limited["tokens"]

    assert await counts() == (3, 10, 3)
    del told[1]
    merged.worker_ended(1)
    assert await counts() == (3, 10, 3)
    told[1] = describe_usage({"a": first, "b": first})  # its successor
    assert await counts() == (4, 20, 3)


async def test_usage_is_asked_for_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers end without notice, after which only what they have told before is left."""
    told = {0: describe_usage({"a": KeyCounts(requests=2)})}
    asked = asyncio.Semaphore(0)

    async def gather(topic: Topic) -> dict[int, bytes]:
        assert topic is Topic.USAGE
        asked.release()
        return told

    monkeypatch.setattr(merged_usage, "ASK_SECONDS", 0.0)
    merged = MergedUsage(gather)
    running = asyncio.create_task(merged.run())
    for _ in range(2):
        await asked.acquire()
    running.cancel()
    told.clear()
    merged.worker_ended(0)
    assert read_usage(await merged.get())["a"].requests == 2
