"""The metrics page: the series of nodes, and rendering that does not hold the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.proto import tandem_pb2 as pb
from tandem.router import metrics as module
from tandem.router.cluster.node_series import SERIES
from tandem.router.cluster.node_table import NodeTable
from tandem.router.metrics import Metrics


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
    shown = samples(Metrics(table).render())
    assert shown["tandem_node_running", "plain"] == 3
    assert shown["tandem_node_total_blocks", "plain"] == 2**31
    assert shown["tandem_node_heartbeat_age_seconds", "plain"] == 1.5
    assert shown["tandem_node_queued_prefill_tokens", 'a "quoted" \\ name'] == 70
    assert len(shown) == 2 * (len(SERIES) + 2)


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
    made: list[threading.Thread] = []
    may_end = threading.Event()

    def slow(registry: Any) -> bytes:
        made.append(threading.current_thread())
        assert may_end.wait(10)
        return b"made\n"

    monkeypatch.setattr(module, "generate_latest", slow)
    metrics = Metrics(NodeTable(3.0))
    asked = [asyncio.create_task(metrics.page()) for _ in range(3)]
    while not made:  # noqa: ASYNC110 (a thread has no event of this loop)
        await asyncio.sleep(0.001)
    asked[0].cancel()  # the first who asked hangs up
    may_end.set()
    pages = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(pages[0], asyncio.CancelledError)
    assert all(isinstance(page, bytes) and page.startswith(b"made") for page in pages[1:])
    assert len(made) == 1 and made[0] is not threading.main_thread()


async def test_an_old_page_is_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_REUSE", 0.0)
    table = NodeTable(3.0)
    metrics = Metrics(table)
    assert not samples(await metrics.page())
    join(table, "a")
    assert samples(await metrics.page())
