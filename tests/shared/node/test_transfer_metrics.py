"""The series that one attempt adds to, by how it ends."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from tandem.shared.causes import Cause
from tandem.shared.errors import OverloadedError, PeerRefusedError, TransferError
from tandem.shared.handoff.inbox import Connections
from tandem.shared.handoff.plane.messages import PeerJoined
from tandem.shared.handoff.wire.frame import ChecksumError
from tandem.shared.node.transfer_metrics import TransferMetrics


def transfer_counts(registry: CollectorRegistry) -> list[dict[str, str]]:
    """The labels of every attempt that was counted."""
    return [
        sample.labels
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "tandem_transfers_total"
    ]


@pytest.mark.parametrize(
    ("error", "outcome", "cause"),
    [
        (TransferError("late", cause=Cause.LEASE), "failed", "lease"),
        (ChecksumError("flipped"), "failed", "checksum"),
        (PeerRefusedError("other model"), "refused", "refused"),
        (PeerRefusedError("other KV", cause=Cause.CANARY), "refused", "canary"),
        (OverloadedError("full"), "refused", "busy"),
        (asyncio.CancelledError(), "cancelled", "cancelled"),
        (ValueError("a bug"), "failed", "other"),
    ],
)
def test_a_failure_is_counted_by_outcome_and_cause(
    error: BaseException, outcome: str, cause: str
) -> None:
    registry = CollectorRegistry()
    with pytest.raises(type(error)), TransferMetrics(registry).attempt(0):
        raise error
    [labels] = transfer_counts(registry)
    assert (labels["outcome"], labels["cause"], labels["carrier"]) == (outcome, cause, "none")


def test_a_success_counts_its_bytes_and_exposed_seconds() -> None:
    registry = CollectorRegistry()
    with TransferMetrics(registry).attempt(0) as record:
        record.carrier = "tcp"
        record.succeeded("committed", 1000, 0.25)
        record.failed(asyncio.CancelledError())  # the peer hung up afterwards
    which = {"carrier": "tcp", "attempt": "1"}
    assert transfer_counts(registry) == [{"outcome": "committed", "cause": "", **which}]
    assert registry.get_sample_value("tandem_transfer_bytes_total", which) == 1000
    assert registry.get_sample_value("tandem_transfer_exposed_seconds_sum", which) == 0.25
    seconds = {"outcome": "committed", **which}
    assert registry.get_sample_value("tandem_transfer_seconds_count", seconds) == 1


def test_labels_stay_few_however_often_something_is_tried() -> None:
    registry = CollectorRegistry()
    metrics = TransferMetrics(registry)
    for number in range(50):
        with metrics.attempt(number) as record:
            record.failed(TransferError("", cause=Cause(f"a newer version's word {number}")))
    assert {labels["attempt"] for labels in transfer_counts(registry)} == {"1", "2", "3+"}
    assert {labels["cause"] for labels in transfer_counts(registry)} == {"other"}


def test_the_carrier_of_a_peer_is_what_its_ranks_use() -> None:
    connections = Connections()
    assert connections.carrier("p", 1) == "none"
    for rank, carrier, expected in ((0, "tcp", "tcp"), (1, "shared_memory", "mixed")):
        event = PeerJoined(node_id="p", epoch=1, rank=rank, carrier=carrier, note="")
        connections.joined(rank, event)
        assert connections.carrier("p", 1) == expected
    assert connections.carrier("p", 2) == "none"
    for number in range(2000):
        event = PeerJoined(node_id=f"p{number}", epoch=1, rank=0, carrier="tcp", note="")
        connections.joined(0, event)
    assert connections.carrier("p", 1) == "none" and connections.carrier("p1999", 1) == "tcp"
