"""Prefill nodes of --pd-url: when they join, stay, and are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import PrefillServicer, add_PrefillServicer_to_server
from tandem.tests.router.support import FakeDecodeNode, cluster, make_model, until


class NamedNode(PrefillServicer):
    """A prefill node that reports the number of ``polls`` as its load."""

    def __init__(self, model: Path) -> None:
        self.polls = 0
        self.address = ""
        self._card = FakeDecodeNode("p", []).join_request(model).model

    async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusReply:
        self.polls += 1
        return pb.StatusReply(
            node_id="p",
            epoch=1,
            role=pb.ROLE_PREFILL,
            ready=True,
            load=pb.Load(running=self.polls),
            model=self._card,
        )


@asynccontextmanager
async def static_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NamedNode]:
    monkeypatch.setattr("tandem.router.cluster.static_nodes.POLL_SECONDS", 0.02)
    node = NamedNode(make_model(tmp_path / "model"))
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    add_PrefillServicer_to_server(node, server)
    node.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield node
    finally:
        await server.stop(grace=None)


async def test_a_named_node_stays_while_no_decode_node_takes_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        static_node(tmp_path, monkeypatch) as node,
        cluster(tmp_path, nodes=0, pd_url=node.address) as c,
    ):
        await until(lambda: node.polls > 2)
        assert c.router.nodes.find("p") is None, "there is no decode node to compare it with"
        await c.add()
        await until(lambda: c.router.nodes.find("p") is not None)
        entry = c.router.nodes["p"]
        c.router.nodes["decode-0"].drain()
        polls = node.polls
        await until(lambda: entry.load.running > polls + 1)


async def test_a_named_node_has_no_say_in_the_model(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0, pd_url="127.0.0.1:9") as c:
        old = FakeDecodeNode("p", [])
        old.port = 9
        request = old.join_request(c.model, "layers=3", role=pb.ROLE_PREFILL)
        request.model.name = "another"
        await c.registry.Join(request)
        await c.add()
        assert (await c.chat()).status_code == 200


async def test_a_named_node_that_is_refused_is_counted_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        static_node(tmp_path, monkeypatch) as node,
        cluster(tmp_path, pd_url=node.address, max_nodes=1) as c,
    ):
        absent = c.router.nodes.absent
        await until(lambda: absent.refused.labels("prefill")._value.get() > 2)
        assert absent.tally() == {("prefill", "refused"): 1}
        [message] = [r.getMessage() for r in caplog.records if "is refused" in r.getMessage()]
        assert f"node p at {node.address} is refused: this router takes at most 1 node" in message
