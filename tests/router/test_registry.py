"""Nodes join, fall silent, come back and leave; the router's metrics show them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import PrefillServicer, add_PrefillServicer_to_server
from tandem.router.cluster import admin
from tandem.router.cluster.node_table import NodeTable
from tandem.router.cluster.registry import Registry, _reachable
from tandem.router.options import RouterOptions
from tandem.router.placement.node_prefixes import PromptKeys
from tandem.router.server import Router, run_router
from tandem.shared.errors import RequestError, StartupError, UnavailableError, UsageError
from tandem.shared.kv.prefix_keys import chain_keys, pack_keys, short_key
from tandem.shared.kv.published import PrefixDigest
from tandem.shared.security.credentials import Credentials
from tandem.tests.router.support import FakeNode, cluster, make_model, until


def refusal(caught: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> tuple[grpc.StatusCode, str]:
    return caught.value.code(), caught.value.details() or ""


async def test_a_node_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        stranger = FakeNode("decode-9", [])
        stranger.port = 9
        request = stranger.join_request(c.model, "layers=3")
        request.model.name = "another"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await c.registry.Join(request)
        code, details = refusal(caught)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "layers is '2' in the cluster and '3' on the node ('another')" in details


async def test_a_folder_that_cannot_be_read_keeps_out_its_node_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        node = FakeNode("decode-0", c.encode("hello"))
        await node.start()
        c.nodes.append(node)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await c.registry.Join(node.join_request(Path("/" + "x" * 300)))
            code, details = refusal(caught)
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert "the router cannot use the model's tokenizer" in details
            assert "File name too long" in details
        told = [r for r in caplog.records if "is refused" in r.getMessage()]
        assert len(told) == 1, "once, however often it asks"
        await c.registry.Join(node.join_request(c.model))
        assert (await c.chat()).status_code == 200


async def test_a_bug_in_the_loading_of_a_tokenizer_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> None:
        raise MemoryError

    async with cluster(tmp_path, nodes=0) as c:
        with monkeypatch.context() as patch:
            patch.setattr("tandem.shared.text.tokenizer.Tokenizer.load", broken)
            with pytest.raises(grpc.aio.AioRpcError):
                await c.add()
        await c.add()
        assert (await c.chat()).status_code == 200


async def test_two_versions_serve_side_by_side_and_are_never_paired(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for name, version in (("prefill-old", "layers=2"), ("prefill-new", "layers=3")):
            node = FakeNode(name, [])
            node.port = 9
            await c.registry.Join(node.join_request(c.model, version, role=pb.ROLE_PREFILL))
        new = FakeNode("decode-new", c.encode("new"))
        await new.start()
        c.nodes.append(new)
        await c.registry.Join(new.join_request(c.model, "layers=3"))
        for index in range(8):
            assert (await c.complete(f"{index} " * 90)).status_code == 200
        for node, partner in ((c.node, "prefill-old"), (new, "prefill-new")):
            asked = [candidate.node_id for r in node.requests for candidate in r.prefill]
            assert asked and set(asked) == {partner}


async def test_a_prefill_node_that_was_named_must_fit_the_decode_nodes_of_today(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, pd_url="127.0.0.1:9") as c:
        named = FakeNode("p", [])
        named.port = 9
        request = named.join_request(c.model, "layers=3", role=pb.ROLE_PREFILL)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await c.registry.Join(request)
        assert "layers is '2' in the cluster and '3'" in refusal(caught)[1]
        await c.registry.Join(named.join_request(c.model, role=pb.ROLE_PREFILL))


async def test_a_prefill_node_that_was_named_tells_what_it_holds_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.router.cluster.static_nodes.POLL_SECONDS", 0.02)
    published = PrefixDigest()
    asked: list[int] = []
    named = FakeNode("p", [])

    class Named(PrefillServicer):
        async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusReply:
            asked.append(request.prefix_version)
            changes = published.since(request.prefix_version)
            me = named.join_request(make_model(tmp_path / "model"), role=pb.ROLE_PREFILL)
            reply = pb.StatusReply(
                node_id="p", epoch=1, role=pb.ROLE_PREFILL, ready=True, model=me.model
            )
            told = pb.Prefixes(version=changes.version, base=changes.base, block_size=4, stride=1)
            told.added = pack_keys(changes.added)
            reply.prefixes.CopyFrom(told)
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
                assert [len(n.prefixes) for n in c.router.nodes if n.is_prefill] == [len(published)]
            await until(lambda: asked[-1] == published.since(0).version)
    finally:
        await server.stop(grace=None)


async def test_what_a_node_holds_draws_its_prompts_before_and_after_it_tells(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, nodes=3) as c:
        for node in c.nodes:
            assert node.beat is not None
            node.beat.cancel()
        keys = pb.Prefixes(version=1, block_size=4, stride=1)
        for node in c.nodes:
            await c.registry.Heartbeat(
                pb.HeartbeatRequest(node_id=node.node_id, epoch=node.epoch, prefixes=keys)
            )
        # No heartbeat comes between them: the router itself knows where it sent the first.
        text = "the quick brown fox " * 12
        await c.complete(text)
        (home,) = [node for node in c.nodes if node.requests]
        for _ in range(3):
            await c.complete(text)
        assert len(home.requests) == 4
        # Another node tells that it holds the prompt, and the first has told that it does not.
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
        await c.complete(text, cache_salt="tenant")  # whose prompts nobody holds
        assert all(node.inflight_load.queued_tokens == 0 for node in c.router.nodes)


async def test_a_burst_that_no_heartbeat_has_counted_is_spread(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=3) as c:
        for node in c.nodes:
            assert node.beat is not None
            node.beat.cancel()
            node.delay = 0.05
        prompt = "the quick brown fox " * 12
        await asyncio.gather(*(c.complete(prompt) for _ in range(12)))
        assert all(len(node.requests) >= 2 for node in c.nodes)


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

        def refused(name: str, role: str, words: str, **force: bool) -> None:
            with pytest.raises(RequestError, match=words):
                admin.set_role(registry, name, role, **force)

        for name, role, words in (
            ("x", "decode", "no node is called 'x'; the nodes are: decode-0, "),
            (node.node_id, "prefill", "decode-1 is draining"),
            (node.node_id, "decode", "decode-1 is draining"),
            ("decode-0", "decode", "is already a decode node"),
            ("decode-0", "prefill", "last decode node .*--force"),
        ):
            await asyncio.to_thread(refused, name, role, words)

        assert node.beat is not None
        node.beat.cancel()
        await c.registry.Join(node.join_request(c.model, role=pb.ROLE_PREFILL))
        assert not (await c.registry.Heartbeat(beat)).role
        await c.chat()
        (candidate,) = c.nodes[0].requests[-1].prefill
        assert candidate.node_id == node.node_id
        await asyncio.to_thread(admin.set_role, registry, "decode-0", "prefill", force=True)
        assert (await c.chat()).status_code == 503


async def test_a_tokenizer_of_another_model_is_refused_with_both_sizes(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        request = FakeNode("decode-0", []).join_request(c.model)
        request.address = "127.0.0.1:9"
        request.model.vocab_size = 100
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await c.registry.Join(request)
        code, details = refusal(caught)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "tokenizer.json" in details and "vocab_size is 100" in details


async def test_another_model_may_come_when_all_nodes_have_gone(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0, node_timeout=0.3) as c:
        node = FakeNode("a", c.encode("hello"))
        await node.start()
        c.nodes.append(node)
        await c.registry.Join(node.join_request(c.model, "layers=2"))
        await until(lambda: len(c.router.nodes) == 0)
        await c.registry.Join(node.join_request(c.model, "layers=3"))
        assert (await c.chat()).status_code == 200


async def test_joins_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0, max_nodes=1) as c:
        node = FakeNode("a", [])
        node.port = 9
        good = node.join_request(c.model)
        bad = []
        for change in (
            {"node_id": ""},
            {"node_id": "a\n\x1b[2J"},
            {"role": 0},
            {"address": "x"},
            {"address": "x:0"},
            {"address": "x\x1b[2J:9"},
        ):
            request = pb.JoinRequest()
            request.CopyFrom(good)
            for name, value in change.items():
                setattr(request, name, value)
            bad.append(request)
        for request in bad:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await c.registry.Join(request)
            assert refusal(caught)[0] == grpc.StatusCode.INVALID_ARGUMENT
        missing = node.join_request(tmp_path / "nowhere")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await c.registry.Join(missing)
        assert "tokenizer.json" in refusal(caught)[1]
        await c.registry.Join(good)
        second = FakeNode("b", [])
        second.port = 9
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await c.registry.Join(second.join_request(c.model))
        assert "at most 1" in refusal(caught)[1]


async def test_a_new_start_replaces_the_old_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        old = c.node
        await old.stop()
        new = FakeNode(old.node_id, c.encode("new start"))
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


async def test_operators_see_the_nodes_and_can_drain_one(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=2) as c:
        registry = f"127.0.0.1:{c.router.registry_port}"
        c.load = pb.Load(running=3, queued_prefill_tokens=7, free_blocks=9, total_blocks=10)
        await until(lambda: all(node.load.running == 3 for node in c.router.nodes))
        listed = await asyncio.to_thread(admin.list_nodes, registry)
        heading, *rows = admin.as_table(listed).splitlines()
        assert heading.startswith("NODE      ROLE    STATE")
        assert rows[0].split()[:7] == ["decode-0", "decode", "ready", "3", "0", "7", "9/10"]
        assert json.loads(admin.as_json(listed))[1]["load"]["leases"] == 0

        drained = c.nodes[1]
        await asyncio.to_thread(admin.drain_node, registry, drained.node_id)
        beat = pb.HeartbeatRequest(node_id=drained.node_id, epoch=drained.epoch)
        told = await c.registry.Heartbeat(beat)
        assert told.drain and not told.HasField("drain_seconds")
        for _ in range(4):
            assert (await c.chat()).status_code == 200
        assert not drained.requests
        listed = await asyncio.to_thread(admin.list_nodes, registry)
        assert [node.draining for node in listed] == [False, True]

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
            join.version = "v" * 5000  # more than gRPC takes by itself
            c.router.nodes.join(join, "127.0.0.1:9")
        registry = f"127.0.0.1:{c.router.registry_port}"
        listed = await asyncio.to_thread(admin.list_nodes, registry)
        assert len(listed) == 1000 and not listed[0].load.link_rates
        assert len(admin.as_table(listed).splitlines()) == 1001


async def test_a_router_that_answers_with_an_error_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: Registry, request: pb.ListRequest, context: Any) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls")

    monkeypatch.setattr(Registry, "List", refuse)
    async with cluster(tmp_path, nodes=0) as c:
        registry = f"127.0.0.1:{c.router.registry_port}"
        with pytest.raises(UnavailableError, match="RESOURCE_EXHAUSTED: too many calls") as raised:
            await asyncio.to_thread(admin.list_nodes, registry)
        assert "no router answers" not in str(raised.value)


async def test_a_drain_may_have_a_limit(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        registry = f"127.0.0.1:{c.router.registry_port}"
        beat = pb.HeartbeatRequest(node_id=c.node.node_id, epoch=c.node.epoch)
        for wrong in (-1.0, float("nan"), float("inf")):
            with pytest.raises(RequestError, match="timeout must be seconds"):
                await asyncio.to_thread(admin.drain_node, registry, c.node.node_id, timeout=wrong)
        assert not (await c.registry.Heartbeat(beat)).drain
        await asyncio.to_thread(admin.drain_node, registry, c.node.node_id, timeout=0.0)
        told = await c.registry.Heartbeat(beat)
        assert told.drain and told.HasField("drain_seconds") and told.drain_seconds == 0.0


async def test_a_node_that_sends_no_heartbeats_cannot_be_told_to_drain(tmp_path: Path) -> None:
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
        node = FakeNode("prefill-0", [])
        node.port = 1234
        await c.registry.Join(node.join_request(c.model, role=pb.ROLE_PREFILL))
        c.node.prefill_node = "prefill-0"
        body = (await c.chat()).json()
        (candidate,) = c.node.requests[0].prefill
        assert (candidate.node_id, candidate.epoch) == ("prefill-0", node.epoch)
        assert candidate.address == "127.0.0.1:1234"
        assert body["tandem"]["prefill_nodes"] == ["prefill-0"]
        assert body["tandem"]["decode_nodes"] == ["decode-0"]


def test_a_node_on_every_interface_is_reached_where_it_came_from() -> None:
    assert _reachable("0.0.0.0:5", "ipv4:10.0.0.7:999") == "10.0.0.7:5"
    assert _reachable("[::]:5", "ipv6:%5B::1%5D:999") == "[::1]:5"
    assert _reachable("host:5", "ipv4:10.0.0.7:999") == "host:5"


async def test_metrics_under_vllms_names_and_a_few_of_each_node(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        c.load = pb.Load(running=3, free_blocks=9)
        await c.chat(max_tokens=2)
        await c.chat(temperature=9)
        await until(lambda: all(node.load.running == 3 for node in c.router.nodes))
        text = (await c.client.get("/metrics")).text
        for line in (
            'vllm:num_requests_running{model_name="tiny"} 0.0',
            'vllm:generation_tokens_total{model_name="tiny"} 2.0',
            'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
            'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
            'vllm:inter_token_latency_seconds_count{model_name="tiny"} 1.0',
            'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
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


async def test_a_taken_port_is_a_startup_error(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        for taken in (
            RouterOptions(port=c.router.http_port, registry_port=0),
            RouterOptions(port=0, registry_port=c.router.registry_port),
        ):
            with pytest.raises(StartupError, match="cannot listen"):
                await Router(taken).start()


async def test_run_router_says_when_it_is_ready_and_stops_when_told() -> None:
    stop = asyncio.Event()
    options = RouterOptions(port=0, registry_port=0)
    async with asyncio.timeout(10):
        await run_router(options, stop, lambda router: stop.set())


async def test_an_empty_key_or_a_wrong_address_is_a_usage_error() -> None:
    for wrong in ({"api_key": ""}, {"api_key": "secret,"}, {"api_key": " "}, {"pd_url": "host"}):
        with pytest.raises(UsageError, match="--"):
            Router(RouterOptions(port=0, registry_port=0, **wrong))  # type: ignore[arg-type]


START = """
import asyncio, sys
from tandem.router.options import RouterOptions
from tandem.router.server import run_router
stop = asyncio.Event()
options = RouterOptions(port=0, registry_port=0)
asyncio.run(run_router(options, stop, lambda router: stop.set()))
heavy = {"torch", "numpy", "transformers", "fastapi"} & set(sys.modules)
# Not ru_maxrss: a child inherits what its parent weighed when it forked.
rss = next(x for x in open('/proc/self/status') if x.startswith('VmHWM:'))
print(int(rss.split()[1]) // 1024, *heavy)
assert sys.getswitchinterval() < 0.001, "threads would keep the loop from the interpreter for long"
"""


def test_a_router_starts_light(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-c", START], capture_output=True, text=True, check=True, timeout=60
    )
    megabytes, *heavy = made.stdout.split()
    assert not heavy
    assert int(megabytes) < 150


async def test_a_router_with_a_token_shows_it_asks_for_it_and_counts_who_lacks_it(
    tmp_path: Path,
) -> None:
    options = RouterOptions(port=0, registry_port=0, drain_timeout=1.0)
    router = Router(options, credentials=Credentials(token="of the cluster"))
    await router.start()
    try:
        address = f"127.0.0.1:{router.registry_port}"
        for token in ("", "wrong"):
            with pytest.raises(RequestError, match="every part of this cluster needs the same"):
                await asyncio.to_thread(admin.list_nodes, address, Credentials(token=token))
        assert (
            await asyncio.to_thread(admin.list_nodes, address, Credentials(token="of the cluster"))
            == []
        )
        text = router.metrics.render().decode()
        for reason in ("no token", "wrong token"):
            assert f'tandem_registry_calls_refused_total{{reason="{reason}"}} 1.0' in text
    finally:
        await router.stop()


async def test_a_registry_for_other_machines_needs_a_lock_or_the_operators_word() -> None:
    options = RouterOptions(port=0, registry_port=0, registry_host="0.0.0.0")
    with pytest.raises(UsageError, match=r"--registry-host 0.0.0.0 is reachable"):
        await Router(options).start()
    trusting = Router(replace(options, insecure=True))
    await trusting.start()
    await trusting.stop()
