"""The data planes' counts reach Prometheus."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from tandem.shared.handoff.plane import loop as plane_loop
from tandem.shared.handoff.plane.messages import CancelSend, Received
from tandem.shared.handoff.plane.stats import DataPlaneStats
from tandem.shared.node.plane_metrics import PlaneCollector
from tandem.tests.shared.handoff.support.plane_pair import BLOCK, CELL, LAYERS, PlaneRank, until
from tandem.tests.support.fake_node import FakeNode

pytestmark = pytest.mark.usefixtures("each_carrier")


@pytest.fixture(autouse=True)
def prompt_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane_loop, "REPORT_SECONDS", 0.02)


def _latest(rank: PlaneRank) -> dict[str, float]:
    """All series of one rank, by name and labels, as it last reported them."""
    registry = CollectorRegistry()
    registry.register(PlaneCollector({0: rank.log.of(DataPlaneStats)[-1]}))
    return {
        ",".join([sample.name.removeprefix("tandem_data_plane_"), *sample.labels.values()]): (
            sample.value
        )
        for family in registry.collect()
        for sample in family.samples
    }


def _shows(rank: PlaneRank, **expected: float) -> None:
    def reached() -> bool:
        if not rank.log.of(DataPlaneStats):
            return False
        metrics = _latest(rank)
        return all(metrics[name] == value for name, value in _named(expected).items())

    until(reached)


def _named(expected: dict[str, float]) -> dict[str, float]:
    return {name.replace("__", ",0,"): value for name, value in expected.items()}


def test_bytes_frames_credit_and_slots_move_with_a_transfer() -> None:
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        _shows(prefill, staging_slots__free=8, staging_slots__held=0)
        fields = {"first_token": 0, "end_token": BLOCK, "window_bytes": 4096}
        decode.expect(prefill, 7, [1], **fields)
        prefill.open(decode, 7, [2], **fields)
        _shows(prefill, credit_bytes__free=4096, transfers__sending=1)
        _shows(decode, transfers__receiving=1)
        prefill.compute(7, 0, BLOCK, chunk=BLOCK)
        decode.log.wait(Received, 7)
        size = LAYERS * BLOCK * CELL
        _shows(prefill, bytes_total__sent=size, credit_bytes__free=0, transfers__sending=0)
        _shows(decode, bytes_total__received=size, frames_dropped_total__refused=0)


def test_a_cancelled_transfer_gives_its_credit_back() -> None:
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        fields = {"first_token": 0, "end_token": BLOCK}
        decode.expect(prefill, 7, [1], **fields)
        prefill.open(decode, 7, [2], window_bytes=4096, **fields)
        _shows(prefill, credit_bytes__free=4096)
        prefill.plane.submit(CancelSend(transfer_id=7, attempt=1))
        _shows(prefill, credit_bytes__free=0, credit_bytes__in_flight=0)


async def test_a_node_shows_what_each_rank_reported() -> None:
    node = FakeNode("d", 7)
    for rank in (0, 1):
        stats = DataPlaneStats(
            frames_stale=3 + rank, frames_refused=2, checksum_failures=1, credit_in_flight=512
        )
        node.ranks.inbox.on_event(rank, stats)
    prefix = "tandem_data_plane_"
    for name, stale in (("0", 3), ("1", 4)):
        assert node.metric(f"{prefix}frames_dropped_total", rank=name, reason="stale") == stale
        assert node.metric(f"{prefix}frames_dropped_total", rank=name, reason="refused") == 2
        assert node.metric(f"{prefix}checksum_failures_total", rank=name) == 1
        assert node.metric(f"{prefix}credit_bytes", rank=name, state="in_flight") == 512
    names = {sample.name for sample in node.metrics.samples()}
    assert f"{prefix}checksum_failures_total" in names
    line = b'tandem_data_plane_bytes_total{direction="sent",node="d",rank="1"} 0.0'
    assert line in node.metrics.text()
