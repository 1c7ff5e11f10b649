"""Decode nodes that send heartbeats but cannot be reached are ejected."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc
import pytest

from tandem.router.cluster.ejection import Ejection
from tandem.tests.router.node_scripts import hang, refuse
from tandem.tests.router.support import cluster, until
from tandem.tests.support.clock import SteppedClock


def test_each_pause_is_twice_as_long_until_a_reply() -> None:
    clock = SteppedClock()
    node = Ejection(clock)
    pauses = []
    for _ in range(7):
        node.on_sent("request")
        pauses.append(node.on_failure("request"))
        assert node.ejected
        clock.now += pauses[-1]
        assert not node.ejected
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    node.on_sent("request")
    node.on_reply("request")
    assert not node.ejected
    node.on_sent("request")
    assert node.on_failure("request") == 1.0


def test_failures_during_a_pause_count_once() -> None:
    node = Ejection(SteppedClock())
    for request in range(5):
        node.on_sent(request)
    assert [node.on_failure(request) for request in range(5)] == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_after_a_pause_one_request_is_sent_at_a_time() -> None:
    clock = SteppedClock()
    node = Ejection(clock)
    node.on_sent("first")
    clock.now += node.on_failure("first")
    assert not node.ejected
    node.on_sent("trial")
    assert node.ejected
    node.on_end("trial")  # its client has left, which proves nothing
    assert not node.ejected
    node.on_sent("another")
    node.on_reply("another")
    assert not node.ejected


def test_a_node_that_compiles_a_grammar_is_not_slow() -> None:
    clock = SteppedClock()
    node = Ejection(clock)
    node.on_sent("grammar", compiles=True)
    clock.now += 9.0
    assert not node.ejected
    clock.now += node.on_failure("grammar")
    node.on_sent("trial", compiles=True)  # after a pause, one request at a time
    assert node.ejected
    node.on_reply("trial")
    assert not node.ejected


def test_a_node_that_is_slow_to_reply_gets_no_more_requests() -> None:
    clock = SteppedClock()
    node = Ejection(clock)
    node.on_sent("slow")
    clock.now += 1.9
    node.on_sent("later")
    assert not node.ejected
    clock.now += 0.2
    assert node.ejected
    node.on_reply("slow")
    assert not node.ejected


async def test_a_node_that_cannot_be_reached_costs_one_request_its_timeout_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.shared.process.backoff.FIRST_PAUSE_SECONDS", 3600.0)
    monkeypatch.setattr("tandem.shared.process.backoff.MAX_PAUSE_SECONDS", 3600.0)
    async with cluster(tmp_path, nodes=2, admission_timeout=0.2) as c:
        c.nodes[0].script = hang
        while not c.nodes[0].requests:
            assert (await c.complete("x")).status_code == 200
        for _ in range(10):
            assert (await c.complete("x")).status_code == 200
        assert len(c.nodes[0].requests) == 1
        assert 'tandem_decode_nodes_ejected_total{reason="no answer"} 1.0' in (
            c.router.metrics.render().decode()
        )
        message = r"decode-0 is ejected for 3600 s: no answer, [0-9.]+ s after its last heart"
        assert re.search(message, caplog.text)


async def test_the_only_node_is_used_while_ejected_and_recovers_when_it_replies(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, admission_timeout=0.2) as c:
        c.node.script = refuse(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        assert (await c.complete("x")).status_code == 503
        (node,) = c.router.nodes
        assert node.ejection.ejected
        c.node.script = None
        assert (await c.complete("x")).status_code == 200
        assert not node.ejection.ejected


@pytest.mark.parametrize(
    ("code", "details", "status"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many", 503),
        (grpc.StatusCode.INVALID_ARGUMENT, "too long", 400),
        (grpc.StatusCode.UNAVAILABLE, "this node is draining", 503),
    ],
)
async def test_a_node_that_rejects_a_request_is_reachable(
    tmp_path: Path, code: grpc.StatusCode, details: str, status: int
) -> None:
    async with cluster(tmp_path) as c:
        c.node.script = refuse(code, details)
        assert (await c.complete("x")).status_code == status
        assert not any(node.ejection.ejected for node in c.router.nodes)


async def test_a_disconnect_of_the_client_does_not_eject_the_node(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        c.node.script = hang
        task = asyncio.create_task(c.complete("x"))
        await until(lambda: bool(c.node.requests))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (node,) = c.router.nodes
        await until(lambda: not node.inflight_requests)
        assert not node.ejection.ejected
