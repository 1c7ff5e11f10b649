"""Connections that die while idle, because a firewall or NAT has dropped them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.tests.end_to_end.handoff.fault_proxy import BOTH, Wire, running_proxy
from tandem.tests.router.node_scripts import refuse
from tandem.tests.router.support import Cluster, FakeDecodeNode, cluster, until


@asynccontextmanager
async def behind_a_wire(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Wire]]:
    """A node behind a wire, over which it has served a request."""
    with running_proxy() as proxy:
        wire = proxy.wire()
        async with cluster(tmp_path, nodes=0) as c:
            node = FakeDecodeNode("decode-0", c.encode("hello world"))
            await node.start()
            c.nodes.append(node)
            wire.target = "127.0.0.1", node.port
            await c.registry.Join(node.join_request(c.model, address=f"127.0.0.1:{wire.port}"))
            node.beat = asyncio.create_task(c._beat(node))
            assert (await c.chat()).status_code == 200
            yield c, wire


@pytest.mark.parametrize("how", ["silently", "with a reset"])
async def test_requests_over_a_connection_that_has_died_are_served_over_another(
    tmp_path: Path, how: str
) -> None:
    async with behind_a_wire(tmp_path) as (c, wire):
        if how == "silently":
            wire.forget()
            requests = [asyncio.create_task(c.chat(stream=n % 2 == 0)) for n in range(4)]
        else:

            async def dies(request: pb.GenerateRequest, context: Any) -> Any:
                c.node.script = None
                wire.reset()
                await asyncio.sleep(60)
                yield

            c.node.script = dies
            requests = [asyncio.create_task(c.chat())]
        for response in await asyncio.gather(*requests):
            assert response.status_code == 200 and "hello" in response.text
        [node] = c.router.nodes
        assert node.state == "ready" and not node.ejected


async def test_a_request_waits_for_a_dead_node_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.router.node_streams.connection.RECONNECT_SECONDS", 0.2)
    async with behind_a_wire(tmp_path) as (c, wire):
        wire.hole(*BOTH)  # new connections as well
        assert (await c.chat()).status_code == 503
        assert len(c.node.requests) == 1, "the one that came before"


async def test_a_request_that_a_node_rejects_is_not_sent_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        assert (await c.chat()).status_code == 200
        c.node.requests.clear()
        c.node.script = refuse(grpc.StatusCode.UNAVAILABLE, "this node is draining")
        assert (await c.chat()).status_code == 503
        assert len(c.node.requests) == 1


async def test_an_idle_connection_that_died_is_replaced_before_the_next_request(
    tmp_path: Path,
) -> None:
    async with behind_a_wire(tmp_path) as (c, wire):
        [node] = c.router.nodes
        channel = node._connection._channel
        assert channel is not None
        wire.forget()
        ready = grpc.ChannelConnectivity.READY
        await until(lambda: channel.get_state() is not ready)
