"""Operators list nodes, drain them and change their roles."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster import admin
from tandem.router.cluster.registry_service import Registry
from tandem.shared.errors import RequestError, UnavailableError
from tandem.tests.router.support import cluster, until


async def test_operators_can_change_the_role_of_a_node(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=2) as c:
        registry = f"127.0.0.1:{c.router.registry_port}"
        node = c.nodes[1]
        await asyncio.to_thread(admin.set_role, registry, node.node_id, "prefill")
        beat = pb.HeartbeatRequest(node_id=node.node_id, epoch=node.epoch)
        assert (await c.registry.Heartbeat(beat)).role == pb.ROLE_PREFILL
        table = admin.as_table(await asyncio.to_thread(admin.list_nodes, registry))
        assert "to prefill" in table
        for _ in range(4):
            assert (await c.chat()).status_code == 200
        assert not node.requests

        def check_refused(name: str, role: str, words: str, force: bool = False) -> None:
            with pytest.raises(RequestError, match=words):
                admin.set_role(registry, name, role, force=force)

        for name, role, words in (
            ("x", "decode", "no node is called 'x'; the nodes are: decode-0, "),
            (node.node_id, "prefill", "decode-1 is draining"),
            (node.node_id, "decode", "decode-1 is draining"),
            ("decode-0", "decode", "is already a decode node"),
            ("decode-0", "prefill", "last decode node .*--force"),
        ):
            await asyncio.to_thread(check_refused, name, role, words)

        assert node.beat is not None
        node.beat.cancel()
        await c.registry.Join(node.join_request(c.model, role=pb.ROLE_PREFILL))
        assert not (await c.registry.Heartbeat(beat)).role
        await c.chat()
        (candidate,) = c.nodes[0].requests[-1].prefill
        assert candidate.node_id == node.node_id
        await asyncio.to_thread(admin.set_role, registry, "decode-0", "prefill", force=True)
        assert (await c.chat()).status_code == 503


async def test_operators_see_the_nodes_and_can_drain_one(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=2) as c:
        registry = f"127.0.0.1:{c.router.registry_port}"
        c.load = pb.Load(running=3, queued_prefill_tokens=7, free_blocks=9, total_blocks=10)
        await until(lambda: all(node.load.running == 3 for node in c.router.nodes))
        listing = await asyncio.to_thread(admin.list_nodes, registry)
        heading, *rows = admin.as_table(listing).splitlines()
        assert heading.startswith("NODE      ROLE    STATE")
        assert rows[0].split()[:7] == ["decode-0", "decode", "ready", "3", "0", "7", "9/10"]
        assert json.loads(admin.as_json(listing))[1]["load"]["leases"] == 0

        drained = c.nodes[1]
        await asyncio.to_thread(admin.drain_node, registry, drained.node_id)
        beat = pb.HeartbeatRequest(node_id=drained.node_id, epoch=drained.epoch)
        reply = await c.registry.Heartbeat(beat)
        assert reply.drain and not reply.HasField("drain_seconds")
        for _ in range(4):
            assert (await c.chat()).status_code == 200
        assert not drained.requests
        listing = await asyncio.to_thread(admin.list_nodes, registry)
        assert [node.draining for node in listing.nodes] == [False, True]

        with pytest.raises(RequestError, match="no node is called 'x'; the nodes are: decode-0, "):
            await asyncio.to_thread(admin.drain_node, registry, "x")
    with pytest.raises(UnavailableError, match=f"no router answers at {registry}"):
        await asyncio.to_thread(admin.list_nodes, registry)


async def test_a_thousand_nodes_are_listed_whatever_they_have_measured(tmp_path: Path) -> None:
    rates = [pb.LinkRate(node_id=f"{n:0200}", tokens_per_second=1.0) for n in range(30)]
    async with cluster(tmp_path, nodes=0) as c:
        for number in range(1000):
            join = pb.JoinRequest(node_id=f"{number:0250}", epoch=1, role=pb.ROLE_PREFILL)
            join.load.link_rates.extend(rates)
            join.version = "v" * 5000  # above gRPC's default limit
            c.router.nodes.join(join, "127.0.0.1:9")
        registry = f"127.0.0.1:{c.router.registry_port}"
        listing = await asyncio.to_thread(admin.list_nodes, registry)
        assert len(listing.nodes) == 1000 and not listing.nodes[0].load.link_rates
        assert len(admin.as_table(listing).splitlines()) == 1001


async def test_an_error_reply_shows_that_a_router_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: Registry, request: pb.ListRequest, context: Any) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests")

    monkeypatch.setattr(Registry, "List", refuse)
    async with cluster(tmp_path, nodes=0) as c:
        registry = f"127.0.0.1:{c.router.registry_port}"
        with pytest.raises(
            UnavailableError, match="RESOURCE_EXHAUSTED: too many requests"
        ) as error_info:
            await asyncio.to_thread(admin.list_nodes, registry)
        assert "no router answers" not in str(error_info.value)


async def test_a_drain_may_have_a_limit(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        registry = f"127.0.0.1:{c.router.registry_port}"
        beat = pb.HeartbeatRequest(node_id=c.node.node_id, epoch=c.node.epoch)
        for wrong in (-1.0, float("nan"), float("inf")):
            with pytest.raises(RequestError, match="timeout must be seconds"):
                await asyncio.to_thread(admin.drain_node, registry, c.node.node_id, timeout=wrong)
        assert not (await c.registry.Heartbeat(beat)).drain
        await asyncio.to_thread(admin.drain_node, registry, c.node.node_id, timeout=0.0)
        reply = await c.registry.Heartbeat(beat)
        assert reply.drain and reply.HasField("drain_seconds") and reply.drain_seconds == 0.0


async def test_a_node_without_heartbeats_cannot_be_drained(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0, pd_url="127.0.0.1:9") as c:
        request = pb.JoinRequest(
            node_id="p", epoch=1, role=pb.ROLE_PREFILL, address="127.0.0.1:9", model=pb.ModelCard()
        )
        await c.registry.Join(request)
        registry = f"127.0.0.1:{c.router.registry_port}"
        with pytest.raises(RequestError, match=r"one of --pd-url.*SIGTERM"):
            await asyncio.to_thread(admin.drain_node, registry, "p")
        with pytest.raises(RequestError, match=r"one of --pd-url"):
            await asyncio.to_thread(admin.set_role, registry, "p", "decode")
