"""Nodes that leave, fall silent and return."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster import admin
from tandem.router.cluster.admin import describe_absence
from tandem.router.cluster.node_table import NodeTable
from tandem.shared.kv.prefix_keys import pack_keys
from tandem.tests.router.support import FakeDecodeNode, cluster, until
from tandem.tests.support.clock import SteppedClock


async def test_a_new_start_replaces_the_old_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        old = c.node
        await old.stop()
        new = FakeDecodeNode(old.node_id, c.encode("new start"))
        new.epoch = old.epoch + 1
        await new.start()
        c.nodes.append(new)
        await c.registry.Join(new.join_request(c.model))
        assert (await c.complete()).json()["choices"][0]["text"] == "new start"
        stale = pb.HeartbeatRequest(node_id=old.node_id, epoch=old.epoch)
        assert not (await c.registry.Heartbeat(stale)).known
        fresh = pb.HeartbeatRequest(node_id=new.node_id, epoch=new.epoch)
        assert (await c.registry.Heartbeat(fresh)).known


async def test_nodes_rejoin_a_restarted_router(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        beat = pb.HeartbeatRequest(node_id="a", epoch=1)
        assert not (await c.registry.Heartbeat(beat)).known


async def test_a_node_that_leaves_gets_no_more_work_but_finishes(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        leaving = c.node
        left = asyncio.Event()

        async def talk(request: Any, context: Any) -> Any:
            await left.wait()
            async for event in leaving._talk(request, context):
                yield event

        leaving.script = talk
        leaving_work = asyncio.create_task(c.chat())
        await until(lambda: leaving.active == 1)
        await c.add("staying")
        assert leaving.beat is not None
        leaving.beat.cancel()
        await c.registry.Leave(pb.LeaveRequest(node_id=leaving.node_id, epoch=leaving.epoch))
        for _ in range(5):
            assert (await c.chat()).status_code == 200
        assert len(leaving.requests) == 1
        assert len(c.router.nodes) == 2
        left.set()
        assert (await leaving_work).status_code == 200
        await until(lambda: len(c.router.nodes) == 1)


def test_a_router_that_stood_still_does_not_take_its_nodes_for_dead() -> None:
    now = 100.0
    table = NodeTable(3.0, lambda: now)
    table.join(pb.JoinRequest(node_id="a", epoch=1, role=pb.ROLE_DECODE), "127.0.0.1:9")
    now += 10
    table.expire(held_up=9)
    now += 1
    table.expire()  # messages that arrived in between may still be unread
    assert len(table) == 1
    now += 2
    table.expire()
    assert len(table) == 0


@pytest.mark.parametrize(
    ("silent", "expected"), [(15, False), (16, True), (30, True)], ids=["few", "some", "most"]
)
async def test_when_many_nodes_fall_silent_at_once_they_are_waited_for(
    silent: int, expected: bool
) -> None:
    now = 100.0
    table = NodeTable(3.0, lambda: now)
    for number in range(40):
        join = pb.JoinRequest(node_id=f"n{number}", epoch=1, role=pb.ROLE_DECODE)
        table.join(join, "127.0.0.1:9")
    for _ in range(3):
        now += 1.2
        for number in range(silent, 40):
            table.heartbeat(pb.HeartbeatRequest(node_id=f"n{number}", epoch=1))
        table.expire()
    assert len(table) == (40 if expected else 40 - silent)
    for _ in range(5):
        now += 1.2
        for number in range(silent, 40):
            table.heartbeat(pb.HeartbeatRequest(node_id=f"n{number}", epoch=1))
        table.expire()
    assert len(table) == 40 - silent
    reasons = {node.reason for node in table.absent.all()}
    assert reasons == {f"was silent for {9 if expected else 3} s"}


async def test_what_a_silent_node_held_is_known_when_the_same_start_of_it_returns() -> None:
    now = 100.0
    table = NodeTable(3.0, lambda: now)
    join = pb.JoinRequest(node_id="a", epoch=1, role=pb.ROLE_DECODE)
    table.join(join, "127.0.0.1:9")
    prefixes = pb.Prefixes(version=7, block_size=4, stride=1, added=pack_keys([1, 2]))
    table.heartbeat(pb.HeartbeatRequest(node_id="a", epoch=1, prefixes=prefixes))
    now += 4
    table.expire()
    assert len(table) == 0
    assert len(table.join(join, "127.0.0.1:9").prefixes) == 2
    assert table.prefix_version("a", 1) == 7
    changed = pb.JoinRequest(node_id="a", epoch=1, role=pb.ROLE_PREFILL)
    assert table.join(changed, "127.0.0.1:9").prefixes.version == 7
    restarted = pb.JoinRequest(node_id="a", epoch=2, role=pb.ROLE_DECODE)
    assert table.join(restarted, "127.0.0.1:9").prefixes.version == 0
    assert table.prefix_version("a", 1) == 0


class Drained:
    """A table with one node, and its clock."""

    def __init__(self, role: pb.Role = pb.ROLE_DECODE) -> None:
        self.clock = SteppedClock()
        self.table = NodeTable(3.0, self.clock)
        self._role = role
        self.join()

    def join(self, epoch: int = 1) -> None:
        request = pb.JoinRequest(node_id="a", epoch=epoch, role=self._role)
        self.table.join(request, "127.0.0.1:9")

    def beat(self, *, draining: bool = False, **load: int) -> None:
        beat = pb.HeartbeatRequest(node_id="a", epoch=1, draining=draining)
        beat.load.MergeFrom(pb.Load(**load))  # type: ignore[arg-type]
        self.table.heartbeat(beat)

    def begin_request(self) -> None:
        self.table["a"].generate(pb.GenerateRequest(), ())

    def silence(self) -> None:
        self.clock.now += 4
        self.table.expire()

    def lost(self) -> float:
        return self.table.absent.lost.labels("decode")._value.get()


def by_signal(node: Drained) -> None:
    node.beat(draining=True, running=2)


def by_command(node: Drained) -> None:
    node.beat(transfers=1)
    node.table["a"].drain()


def with_a_call(node: Drained) -> None:
    node.begin_request()
    node.table["a"].drain()


def to_another_role(node: Drained) -> None:
    node.table["a"].switch(pb.ROLE_PREFILL)


@pytest.mark.parametrize("restarted", [False, True], ids=["silent", "restarted"])
@pytest.mark.parametrize("drain", [by_signal, by_command, with_a_call, to_another_role])
async def test_a_node_that_dies_while_it_drains_is_lost(
    drain: Callable[[Drained], None], restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    node = Drained()
    drain(node)
    if restarted:
        node.join(epoch=2)
    else:
        node.silence()
    assert node.lost() == 1
    [message] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert ("died and was restarted" if restarted else "was silent for 3 s") in message
    assert [(one.node_id, one.returned) for one in node.table.absent.all()] == [("a", restarted)]
    assert node.table.absent.tally() == ({} if restarted else {("decode", "lost"): 1})
    await node.table.close()


async def test_a_node_that_ends_with_a_failure_is_lost_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason = "rank 0 was killed (SIGKILL), possibly for lack of memory"
    node = Drained()
    node.begin_request()
    old_node = node.table["a"]
    node.table.leave("a", 1, reason)
    assert old_node.lost and len(node.table) == 0 and node.lost() == 1
    [message] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert message == f"decode node a ends: {reason}"
    node.clock.now += 12
    [absent] = node.table.absent.all()
    assert describe_absence(absent) == f"left 12 s ago: {reason}"
    assert node.table.absent.tally() == {("decode", "lost"): 1}
    node.join(epoch=2)
    [absent] = node.table.absent.all()
    assert describe_absence(absent).endswith("; it has returned since")
    assert not node.table.absent.tally() and node.lost() == 1
    await node.table.close()


async def test_a_nodes_failure_message_is_sanitized(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        leave = pb.LeaveRequest(node_id=c.node.node_id, epoch=c.node.epoch)
        leave.failure = "a\nb \x1b[2J" + "x" * 5000
        assert c.node.beat is not None
        c.node.beat.cancel()
        await c.registry.Leave(leave)
        assert (await c.client.get("/ready")).status_code == 503
        listing = await c.registry.List(pb.ListRequest())
        [absent] = listing.absent
        assert absent.failed and absent.reason.isprintable() and len(absent.reason) <= 1024
        table = admin.as_table(listing)
        assert "decode node decode-0 left 0 s ago: " in table and "\x1b" not in table
        page = (await c.client.get("/metrics")).text
        assert 'tandem_nodes_lost_total{role="decode"} 1.0' in page
        assert 'tandem_nodes{role="decode",state="lost"} 1' in page


def with_a_word(node: Drained) -> None:
    node.beat(draining=True, running=2)
    node.table.leave("a", 1)


def idle(node: Drained) -> None:
    node.beat(draining=True)


def as_a_prefill_node(node: Drained) -> None:
    node.beat(draining=True, running=2, transfers=2)


@pytest.mark.parametrize("restarted", [False, True], ids=["silent", "restarted"])
@pytest.mark.parametrize("end", [with_a_word, idle, as_a_prefill_node])
async def test_a_node_that_has_drained_is_not_lost(
    end: Callable[[Drained], None], restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    node = Drained(pb.ROLE_PREFILL if end is as_a_prefill_node else pb.ROLE_DECODE)
    end(node)
    if restarted:
        node.join(epoch=2)
    else:
        node.silence()
    assert len(node.table) == restarted
    assert node.lost() == node.table.absent.lost.labels("prefill")._value.get() == 0
    assert not node.table.absent.all()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    await node.table.close()
