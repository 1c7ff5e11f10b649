"""The node table: requests, reports, lost nodes."""

from __future__ import annotations

import re

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster.node import Node
from tandem.router.cluster.node_table import NodeTable
from tandem.router.placement.node_prefixes import PromptKeys
from tandem.router.telemetry.metrics import Metrics
from tandem.shared.security.credentials import INSECURE
from tandem.tests.support.clock import SteppedClock

NOBODY = "127.0.0.1:1"


async def test_a_report_from_before_a_request_ended_adds_no_load_of_other_routers() -> None:
    node = Node(pb.JoinRequest(node_id="d", role=pb.ROLE_DECODE), NOBODY, 0.0, INSECURE)

    def sequences(running: int) -> int:
        node.report(pb.Load(running=running), pb.Prefixes())
        return node.view(PromptKeys([1, 2, 3], "")).sequences

    remote = node.generate(pb.GenerateRequest(sampling=pb.Sampling(n=2)), ())
    assert sequences(running=2) == 2  # this router's
    assert sequences(running=3) == 3
    node.end(remote)
    assert sequences(running=2) == 0  # written before it had ended
    assert sequences(running=2) == 2  # so these belong to other routers
    await node.close()


async def test_a_queue_that_was_reported_ends_with_the_requests_on_a_decode_node() -> None:
    node = Node(pb.JoinRequest(node_id="d", role=pb.ROLE_DECODE), NOBODY, 0.0, INSECURE)
    request = node.generate(pb.GenerateRequest(), ())
    node.report(pb.Load(running=1, queued_prefill_tokens=8), pb.Prefixes())
    assert node.view(PromptKeys([1], "")).queued_prefill_tokens == 8
    node.end(request)  # and the next report may be a second away
    assert node.view(PromptKeys([1], "")).queued_prefill_tokens == 0
    node.report(pb.Load(running=1, queued_prefill_tokens=8), pb.Prefixes())
    assert node.queued_tokens == 0  # written before the end
    node.report(pb.Load(running=1, queued_prefill_tokens=8), pb.Prefixes())
    assert node.queued_tokens == 8  # another router's
    await node.close()


def join(table: NodeTable, name: str, epoch: int = 1) -> Node:
    request = pb.JoinRequest(node_id=name, epoch=epoch, role=pb.ROLE_DECODE, address=NOBODY)
    return table.join(request, NOBODY)


async def test_nodes_that_are_lost_or_refused_are_counted_and_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = SteppedClock()
    table = NodeTable(3.0, clock)
    table.absent._clock = clock
    metrics = Metrics(table)

    def value_of(series: str) -> float:
        [value] = re.findall(rf"^{re.escape(series)} (\S+)$", metrics.render().decode(), re.M)
        return float(value)

    metric = 'tandem_nodes_lost_total{role="decode"}'
    assert value_of(metric) == value_of('tandem_nodes_refused_total{role="prefill"}') == 0
    for name in ("silent", "leaves", "restarts"):
        join(table, name)
    join(table, "restarts", epoch=2)
    assert value_of(metric) == 1 and "restarts died and was restarted" in caplog.text
    table.leave("leaves", 1)
    assert table.find("leaves") is None  # at once
    clock.now += 4
    join(table, "restarts", epoch=2)
    table.expire()
    assert value_of(metric) == 2 and "silent was silent for 3 s" in caplog.text
    assert "leaves" not in "".join(r.getMessage() for r in caplog.records if r.levelno > 20)
    assert value_of('tandem_nodes{role="decode",state="lost"}') == 1
    assert value_of('tandem_nodes{role="decode",state="ready"}') == 1
    table.absent.add(pb.AbsentNode(node_id="x", role=pb.ROLE_PREFILL, refused=True))
    assert value_of('tandem_nodes_refused_total{role="prefill"}') == 1
    assert value_of('tandem_nodes{role="prefill",state="refused"}') == 1
    join(table, "silent", epoch=2)
    assert value_of('tandem_nodes{role="decode",state="lost"}') == 0
    await table.close()
