"""Nodes that leave, fall silent and return."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster.node_table import NodeTable
from tandem.shared.kv.prefix_keys import pack_keys
from tandem.tests.router.support import FakeDecodeNode, cluster, until


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


async def test_a_router_that_restarts_asks_its_nodes_to_join_again(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        beat = pb.HeartbeatRequest(node_id="a", epoch=1)
        assert not (await c.registry.Heartbeat(beat)).known


async def test_a_node_that_leaves_gets_no_more_work_but_finishes(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=2) as c:
        leaving, staying = c.nodes
        leaving.delay = 0.05
        leaving_work = asyncio.create_task(c.chat())
        await until(lambda: leaving.active + staying.active == 1)
        for node in (leaving,):
            assert node.beat is not None
            node.beat.cancel()
            await c.registry.Leave(pb.LeaveRequest(node_id=node.node_id, epoch=node.epoch))
        before = len(leaving.requests)
        for _ in range(5):
            assert (await c.chat()).status_code == 200
        assert len(leaving.requests) == before
        assert (await leaving_work).status_code == 200


def test_a_router_that_stood_still_does_not_take_its_nodes_for_dead() -> None:
    now = 100.0
    table = NodeTable(3.0, lambda: now)
    table.join(pb.JoinRequest(node_id="a", epoch=1, role=pb.ROLE_DECODE), "127.0.0.1:9")
    now += 10
    table.expire(held_up=9)
    now += 1
    table.expire()  # what came meanwhile may still be unread
    assert len(table) == 1
    now += 2
    table.expire()
    assert len(table) == 0


@pytest.mark.parametrize(
    ("silent", "kept"), [(15, False), (16, True), (30, True)], ids=["few", "some", "most"]
)
async def test_when_many_nodes_fall_silent_at_once_they_are_waited_for(
    silent: int, kept: bool
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
    assert len(table) == (40 if kept else 40 - silent)
    for _ in range(5):
        now += 1.2
        for number in range(silent, 40):
            table.heartbeat(pb.HeartbeatRequest(node_id=f"n{number}", epoch=1))
        table.expire()
    assert len(table) == 40 - silent
    reasons = {node.reason for node in table.absent.all()}
    assert reasons == {f"was silent for {9 if kept else 3} s"}


async def test_what_a_silent_node_held_is_known_when_the_same_start_of_it_returns() -> None:
    now = 100.0
    table = NodeTable(3.0, lambda: now)
    join = pb.JoinRequest(node_id="a", epoch=1, role=pb.ROLE_DECODE)
    table.join(join, "127.0.0.1:9")
    told = pb.Prefixes(version=7, block_size=4, stride=1, added=pack_keys([1, 2]))
    table.heartbeat(pb.HeartbeatRequest(node_id="a", epoch=1, prefixes=told))
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
