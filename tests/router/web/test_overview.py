"""The overview of the cluster: correct, limited in size, and explicit about what it leaves out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster.node_table import NodeTable
from tandem.router.web.overview import MAX_PREFILLS, MAX_SHOWN, Overview
from tandem.shared.telemetry.stats_line import Work
from tandem.tests.router.support import admitted, cluster, finished, until, usage

WORK = Work(
    prompt_tokens=7, generated_tokens=9, cache_queries=0, cache_hits=0, running=0, waiting=0,
    transfers=0, kv_usage=0.0,
)  # fmt: skip


def join(nodes: NodeTable, name: str, role: pb.Role = pb.ROLE_DECODE, **load: Any) -> None:
    request = pb.JoinRequest(node_id=name, epoch=1, role=role, load=pb.Load(**load))
    nodes.join(request, f"127.0.0.1:{len(nodes) + 1}")


def overview(nodes: NodeTable) -> Overview:
    return Overview(nodes, 1.0, lambda: WORK, lambda: 3)


async def test_nodes_have_their_load_and_state() -> None:
    now = [0.0]
    nodes = NodeTable(10.0, lambda: now[0])
    join(nodes, "p", pb.ROLE_PREFILL, queued_prefill_tokens=40, prefill_tokens_per_second=2.0)
    join(nodes, "d", running=2, waiting=1, total_blocks=10, owned_blocks=3, reserved_blocks=2,
         cached_blocks=1, block_size=16)  # fmt: skip
    overview_now = overview(nodes)
    first = overview_now.now()
    prefill, decode = first.nodes
    assert (prefill.role, prefill.queued_prefill_tokens) == ("prefill", 40)
    assert prefill.prefill_tokens_per_second == 2.0
    assert (decode.kv_used, decode.kv_cached, decode.kv_tokens) == (0.5, 0.1, 160)
    assert (decode.running, decode.waiting, decode.state) == (2, 1, "ready")
    assert (first.requests, first.prompt_tokens, first.generated_tokens) == (3, 7, 9)
    assert overview_now.now() is first, "pages share it for a moment"
    now[0] = 5.0
    prefill_node = nodes.find("p")
    assert prefill_node is not None
    prefill_node.drain()
    nodes.absent.add(pb.AbsentNode(node_id="x", role=pb.ROLE_DECODE, reason="fell silent"))
    later = overview_now.now()
    assert [node.state for node in later.nodes] == ["draining", "late"]
    assert [(node.node_id, node.state) for node in later.missing] == [("x", "lost")]
    for node in nodes:
        await node.close()


async def test_of_a_thousand_nodes_it_shows_those_with_something_to_see_and_sums_the_others() -> (
    None
):
    nodes = NodeTable(10.0)
    for number in range(10):
        join(nodes, f"prefill-{number}", pb.ROLE_PREFILL)
    for number in range(1000):
        join(nodes, f"decode-{number}", running=1, total_blocks=2, owned_blocks=1, block_size=1)
    prefills = [nodes.prefills.begin("prefill-1", "decode-777", 100) for _ in range(100)]
    state = overview(nodes).now()
    names = [node.node_id for node in state.nodes if node.role == "decode"]
    assert len(names) == MAX_SHOWN and "decode-777" in names
    assert len(state.nodes) == MAX_SHOWN + 10
    [others] = state.others
    rest = 1000 - MAX_SHOWN
    assert (others.role, others.nodes, others.running) == ("decode", rest, rest)
    assert others.states == {"ready": rest} and others.kv_used == 0.5
    assert len(state.prefills) == MAX_PREFILLS
    assert state.prefills_left_out == 100 - MAX_PREFILLS
    assert state.generated_tokens == 9 and state.requests == 3
    assert len(state.model_dump_json()) < 30_000
    for prefill in prefills:
        nodes.prefills.end(prefill)
    for node in nodes:
        await node.close()


async def test_a_request_moves_from_its_prefill_node_to_its_decode_node(tmp_path: Path) -> None:
    computed = asyncio.Event()

    async def handed_over(request: Any, context: Any) -> Any:
        yield admitted()
        await computed.wait()
        name = request.prefill[0].node_id
        yield usage(request, prefill_node=name, remote_tokens=len(request.prompt) - 1)
        yield finished(0)

    async with cluster(tmp_path) as c:
        await c.add("prefill-0", role=pb.ROLE_PREFILL)
        c.node.script = handed_over
        task = asyncio.create_task(c.complete("a prompt"))
        await until(lambda: c.node.active == 1)
        [moving] = (await c.client.get("/cluster/state")).json()["prefills"]
        tokens = len(c.encode("a prompt"))
        assert (moving["prefill_node"], moving["decode_node"]) == ("prefill-0", "decode-0")
        assert moving["tokens"] == tokens and moving["ended_seconds_ago"] is None
        computed.set()
        assert (await task).status_code == 200
        prefills = c.router.nodes.prefills
        assert prefills.prompts_moved == 1 and prefills.tokens_moved == tokens - 1
        assert list(prefills.running()) == []
