"""Load and prefixes that nodes report, and the placements that follow from them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import PrefillServicer, add_PrefillServicer_to_server
from tandem.router.cluster.node_table import NodeTable
from tandem.router.cluster.registry_service import Registry
from tandem.router.placement.node_prefixes import PromptKeys
from tandem.shared.kv.prefix_keys import chain_keys, pack_keys, short_key
from tandem.shared.kv.published import PrefixDigest
from tandem.tests.router.support import FakeDecodeNode, cluster, make_model, until


async def test_a_static_prefill_node_whose_reply_fails_does_not_end_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.router.cluster.static_nodes.POLL_SECONDS", 0.01)
    polls: list[pb.StatusRequest] = []

    class Named(PrefillServicer):
        async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusReply:
            polls.append(request)
            return pb.StatusReply(node_id="p", epoch=1, role=pb.ROLE_PREFILL, ready=True)

    def broken(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Registry, "_conflict", broken)
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    add_PrefillServicer_to_server(Named(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with cluster(tmp_path, nodes=0, pd_url=f"127.0.0.1:{port}") as c:
            monkeypatch.setattr(c.router.nodes, "decode_ready", lambda: True)
            await until(lambda: len(polls) > 5)
            assert not any(part.done() for part in c.router.parts())
    finally:
        await server.stop(grace=None)
    messages = [r.getMessage() for r in caplog.records if "prefill node" in r.getMessage()]
    assert sum("failed here: ValueError('a bug')" in line for line in messages) == 1


async def test_a_static_prefill_node_reports_its_prefixes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.router.cluster.static_nodes.POLL_SECONDS", 0.02)
    published = PrefixDigest()
    versions: list[int] = []
    static_node = FakeDecodeNode("p", [])

    class Named(PrefillServicer):
        async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusReply:
            versions.append(request.prefix_version)
            changes = published.since(request.prefix_version)
            me = static_node.join_request(make_model(tmp_path / "model"), role=pb.ROLE_PREFILL)
            reply = pb.StatusReply(
                node_id="p",
                epoch=1,
                role=pb.ROLE_PREFILL,
                ready=True,
                model=me.model,
            )
            report = pb.Prefixes(version=changes.version, base=changes.base, block_size=4, stride=1)
            report.added = pack_keys(changes.added)
            reply.prefixes.CopyFrom(report)
            return reply

    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    add_PrefillServicer_to_server(Named(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with cluster(tmp_path, pd_url=f"127.0.0.1:{port}") as c:
            for tokens in (range(12), range(20)):
                for key in chain_keys(tokens, 4):
                    published.add(key)
                await until(
                    lambda: (
                        [n.prefixes.version for n in c.router.nodes if n.is_prefill]
                        == [published.since(0).version]
                    )
                )
                [node] = [n for n in c.router.nodes if n.is_prefill]
                assert len(node.prefixes) == len(published)
            await until(lambda: versions[-1] == published.since(0).version)
    finally:
        await server.stop(grace=None)


async def test_prompts_go_to_their_prefix_before_and_after_it_is_reported(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, nodes=3, node_timeout=3600.0) as c:
        for node in c.nodes:
            assert node.beat is not None
            node.beat.cancel()
        keys = pb.Prefixes(version=1, block_size=4, stride=1)
        for node in c.nodes:
            await c.registry.Heartbeat(
                pb.HeartbeatRequest(node_id=node.node_id, epoch=node.epoch, prefixes=keys)
            )
        # There is no heartbeat in between: the router counts its own placement.
        text = "the quick brown fox " * 12
        await c.complete(text)
        (home,) = [node for node in c.nodes if node.requests]
        for _ in range(3):
            await c.complete(text)
        assert len(home.requests) == 4
        # Another node reports that it holds the prompt; the first has reported that it does not.
        (other, *_) = [node for node in c.nodes if node is not home]
        tokens = c.encode(text)
        keys.added = pack_keys(map(short_key, chain_keys(tokens, 4)))
        keys.version = 2
        for _ in range(2):
            beat = pb.HeartbeatRequest(node_id=home.node_id, epoch=home.epoch)
            await c.registry.Heartbeat(beat)
        beat = pb.HeartbeatRequest(node_id=other.node_id, epoch=other.epoch, prefixes=keys)
        assert (await c.registry.Heartbeat(beat)).prefix_version == 2
        await c.complete(text)
        assert len(other.requests) == 1
        await c.complete(text, cache_salt="tenant")  # no node holds this tenant's prompts
        assert all(node.inflight_load.queued_tokens == 0 for node in c.router.nodes)


async def test_a_burst_that_no_heartbeat_has_counted_is_spread(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=3, node_timeout=3600.0) as c:

        async def talk(request: Any, context: Any) -> Any:
            await until(lambda: sum(len(node.requests) for node in c.nodes) == 12)
            async for event in c.nodes[0]._talk(request, context):
                yield event

        for node in c.nodes:
            assert node.beat is not None
            node.beat.cancel()
            node.script = talk
        prompt = "the quick brown fox " * 12
        await asyncio.gather(*(c.complete(prompt) for _ in range(12)))
        assert all(len(node.requests) >= 2 for node in c.nodes)


def test_link_rates_add_up_from_reports_and_are_not_listed() -> None:
    table = NodeTable(3.0)

    def rates(**tokens_a_second: float) -> pb.Load:
        links = [
            pb.LinkRate(node_id=name, tokens_per_second=rate)
            for name, rate in tokens_a_second.items()
        ]
        return pb.Load(running=1, link_rates=links)

    join = pb.JoinRequest(node_id="a", epoch=1, role=pb.ROLE_DECODE, load=rates(x=1.0, y=2.0))
    node = table.join(join, "127.0.0.1:9")
    table.heartbeat(pb.HeartbeatRequest(node_id="a", epoch=1, load=rates(y=0.0, z=3.0)))
    assert node.view(PromptKeys([1])).link_rates == {"x": 1.0, "z": 3.0}
    assert not table.infos()[0].load.link_rates and table.infos()[0].load.running == 1


async def test_prefill_candidates_travel_with_the_request(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        node = FakeDecodeNode("prefill-0", [])
        node.port = 1234
        await c.enter(node.join_request(c.model, role=pb.ROLE_PREFILL))
        c.node.prefill_node = "prefill-0"
        body = (await c.chat()).json()
        (candidate,) = c.node.requests[0].prefill
        assert (candidate.node_id, candidate.epoch) == ("prefill-0", node.epoch)
        assert candidate.address == "127.0.0.1:1234"
        assert body["tandem"]["prefill_nodes"] == ["prefill-0"]
        assert body["tandem"]["decode_nodes"] == ["decode-0"]


async def test_metrics_under_vllms_names_and_a_few_of_each_node(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        c.load = pb.Load(running=3, free_blocks=9)
        await c.chat(max_tokens=2)
        await c.chat(temperature=9)
        await until(lambda: all(node.load.running == 3 for node in c.router.nodes))
        text = (await c.client.get("/metrics")).text
        for line in (
            'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0',
            'vllm:generation_tokens_total{engine="0",model_name="tiny"} 2.0',
            'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0',
            'vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 1.0',
            'vllm:inter_token_latency_seconds_count{engine="0",model_name="tiny"} 1.0',
            'vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny"} 1.0',
            'tandem_request_errors_total{status="400"} 1.0',
            'tandem_nodes{role="decode",state="ready"} 1',
            'tandem_nodes{role="prefill",state="ready"} 0',
            'tandem_node_up{node="decode-0",role="decode",state="ready"} 1',
            'tandem_node_running{node="decode-0",role="decode"} 3',
            'tandem_node_free_blocks{node="decode-0",role="decode"} 9',
            'tandem_node_inflight{node="decode-0",role="decode"} 0',
        ):
            assert line in text, line
        assert 'tandem_node_heartbeat_age_seconds{node="decode-0",role="decode"} 0.' in text
        assert (await c.client.get("/version")).json()["version"]
        page = await c.client.get("/")
        assert "innerHTML" not in page.text and "text/html" in page.headers["content-type"]


async def test_the_samples_that_older_nodes_put_into_heartbeats_are_ignored(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        old = pb.HeartbeatRequest(node_id=c.node.node_id, epoch=c.node.epoch)
        # Field 5 was a message with a name (field 1).
        old.MergeFromString(bytes([5 << 3 | 2, 7, 1 << 3 | 2, 5]) + b"spoof")
        assert (await c.registry.Heartbeat(old)).known
        assert "spoof" not in (await c.client.get("/metrics")).text
