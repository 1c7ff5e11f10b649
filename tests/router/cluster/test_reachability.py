"""Nodes are called back: before they are let in, and after a request did not reach them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster import admin
from tandem.router.cluster.node_table import NodeTable
from tandem.router.cluster.reachability import MAX_RPCS, Reachability, UnreachedError
from tandem.shared.security.credentials import INSECURE
from tandem.tests.end_to_end.handoff.fault_proxy import BOTH, running_proxy
from tandem.tests.router.support import Cluster, FakeDecodeNode, cluster, until


async def join_error(c: Cluster, request: pb.JoinRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await c.registry.Join(request)
    return caught.value.code(), caught.value.details() or ""


async def statuses(c: Cluster) -> list[int]:
    return [(await c.client.get(path)).status_code for path in ("/health", "/ready")]


async def test_an_unreachable_node_joins_once_it_is_reachable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        node = FakeDecodeNode("decode-0", c.encode("hello"))
        c.nodes.append(node)
        await node.start()
        port = node.port
        await node.stop()
        for _ in range(3):
            code, details = await join_error(c, node.join_request(c.model))
            assert code is grpc.StatusCode.ABORTED
            assert f"cannot reach this node at 127.0.0.1:{port}: " in details
            assert "refused" in details and "--host" in details and "--advertise" in details
        warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warnings) == 1, "once, however often it asks"
        assert await statuses(c) == [503, 503]
        page = (await c.client.get("/metrics")).text
        assert 'tandem_nodes{role="decode",state="ready"} 0' in page
        assert 'tandem_nodes{role="decode",state="refused"} 1' in page
        await node.start(port)
        await c.registry.Join(node.join_request(c.model))
        assert await statuses(c) == [200, 200]
        assert (await c.chat()).status_code == 200


@pytest.mark.parametrize("role", [pb.ROLE_DECODE, pb.ROLE_PREFILL])
async def test_an_address_of_another_node_is_refused(tmp_path: Path, role: pb.Role) -> None:
    async with cluster(tmp_path) as c:
        other = FakeDecodeNode("elsewhere", [])
        other.port = c.node.port
        code, details = await join_error(c, other.join_request(c.model, role=role))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        reason = f"announces 127.0.0.1:{other.port}, where the router meets node decode-0"
        assert f"node elsewhere {reason}" in details
        assert [node.node_id for node in c.router.nodes] == ["decode-0"]
        stale = c.node.join_request(c.model)
        stale.epoch += 1
        assert "where the router meets another start of it" in (await join_error(c, stale))[1]


async def test_an_address_of_something_else_is_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        stray = FakeDecodeNode("stray", [])
        stray.port = c.router.registry_port
        _, details = await join_error(c, stray.join_request(c.model))
        assert "the server there is not a node of this role" in details
        named = stray.join_request(c.model, address="no-such-host.invalid:9")
        assert "no-such-host.invalid" in (await join_error(c, named))[1]


async def test_a_node_that_takes_over_an_address_leaves_the_one_before_unreachable(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as c:
        before = c.node
        assert before.server is not None
        await before.server.stop(grace=None)  # its heartbeats go on
        after = FakeDecodeNode("decode-1", c.encode("hello"))
        await after.start(before.port)
        c.nodes.append(after)
        await c.registry.Join(after.join_request(c.model))
        await until(lambda: bool(c.router.nodes["decode-0"].unreachable))
        assert "meets node decode-1" in c.router.nodes["decode-0"].unreachable
        for _ in range(4):
            body = (await c.chat()).json()
            assert body["tandem"]["decode_nodes"] == ["decode-1"]


async def test_a_router_is_not_ready_without_a_reachable_decode_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("tandem.router.cluster.reachability.RPC_SECONDS", 0.5)
    with running_proxy() as proxy:
        wire = proxy.wire()
        async with cluster(tmp_path, nodes=0) as c:
            node = FakeDecodeNode("decode-0", c.encode("hello"))
            await node.start()
            c.nodes.append(node)
            wire.target = "127.0.0.1", node.port
            address = f"127.0.0.1:{wire.port}"
            await c.registry.Join(node.join_request(c.model, address=address))
            node.beat = asyncio.create_task(c._beat(node))
            wire.hole(*BOTH)
            assert (await c.chat()).status_code == 503
            beat = pb.HeartbeatRequest(node_id=node.node_id, epoch=node.epoch)

            async def unreachable_reason() -> str:
                return str((await c.registry.Heartbeat(beat)).unreachable)

            [entry] = c.router.nodes
            await until(lambda: entry.state == "unreachable")
            reason = f"the router cannot reach this node at {address}: no answer within 0.5 s"
            assert (await unreachable_reason()).startswith(reason)
            assert await statuses(c) == [200, 503], "health only waits for the first node"
            details = (await c.client.get("/health/details")).json()
            assert details["status"] == "unavailable"
            assert details["nodes"] == {"decode/unreachable": 1}
            page = (await c.client.get("/metrics")).text
            assert 'tandem_nodes{role="decode",state="ready"} 0' in page
            assert 'tandem_nodes{role="decode",state="unreachable"} 1' in page
            registry = f"127.0.0.1:{c.router.registry_port}"
            _, row, _, remark = admin.as_table(
                await asyncio.to_thread(admin.list_nodes, registry)
            ).splitlines()
            assert "unreachable" in row and remark.startswith(f"decode-0: {reason}")
            # Another one that it can call is enough.
            await c.add("decode-1")
            assert await statuses(c) == [200, 200]
            assert (await c.chat()).json()["tandem"]["decode_nodes"] == ["decode-1"]
            # It returns without a request, since none would come.
            wire.heal()
            await until(lambda: entry.state == "ready")
            assert not entry.ejected and not await unreachable_reason()
    messages = [r.getMessage() for r in caplog.records if "node decode-0" in r.getMessage()]
    assert sum("is unreachable" in line for line in messages) == 1
    assert sum("can be reached again" in line for line in messages) == 1


async def test_probes_of_a_thousand_joining_nodes_are_bounded() -> None:
    active = peak = 0

    class Counted(Reachability):
        async def _status(self, role: pb.Role, address: str) -> pb.StatusReply:
            nonlocal active, peak
            active += 1
            peak = max(peak, active)
            await asyncio.sleep(0)
            active -= 1
            return pb.StatusReply(node_id=address, epoch=1)

    reachability = Counted(NodeTable(3.0), INSECURE)
    names = [f"n{number}" for number in range(1000)]
    await asyncio.gather(*(reachability.meet(name, 1, pb.ROLE_DECODE, name) for name in names))
    assert peak == MAX_RPCS


async def test_a_lost_node_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = NodeTable(3.0)
    probes = 0

    class Silent(Reachability):
        async def _status(self, role: pb.Role, address: str) -> pb.StatusReply:
            nonlocal probes
            probes += 1
            raise UnreachedError("no answer", gone=False)

    monkeypatch.setattr("tandem.router.cluster.reachability.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("tandem.router.cluster.reachability.MAX_PAUSE_SECONDS", 0.001)
    reachability = Silent(table, INSECURE)
    node = table.join(pb.JoinRequest(node_id="a", epoch=1, role=pb.ROLE_DECODE), "127.0.0.1:9")
    reachability.doubt(node)
    reachability.doubt(node)
    await until(lambda: probes > 3)
    assert node.unreachable == "no answer"
    node.lose()
    await until(lambda: not reachability._probes)
    await table.close()
