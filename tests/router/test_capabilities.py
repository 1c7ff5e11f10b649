"""A request that an older node would misread is never placed there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc

from tandem.proto import tandem_pb2 as pb
from tandem.proto.capabilities import ALLOWED_TOKEN_IDS, CAPABILITIES
from tandem.router.cluster import admin
from tandem.tests.router.support import Cluster, FakeDecodeNode, cluster

LACKING = {
    "message": (
        "No decode node of this cluster supports 'allowed_token_ids': all run an older version. "
        "Leave it out, or try again after the cluster has been updated."
    ),
    "type": "server_error",
    "param": "allowed_token_ids",
    "code": "capability_unavailable",
}
ALLOWED = {"allowed_token_ids": [20, 21]}


async def unavailable(request: pb.GenerateRequest, context: Any) -> Any:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
    yield


async def add_older(c: Cluster, node_id: str) -> FakeDecodeNode:
    """A node of a version without capabilities: its join announces none."""
    return await c.add(node_id, capabilities=frozenset())


def given(node: FakeDecodeNode) -> list[bool]:
    """For each request that the node received, whether it names allowed tokens."""
    return [bool(request.sampling.allowed_token_ids) for request in node.requests]


def refused(c: Cluster) -> float:
    return c.router.nodes.unsupported.labels(ALLOWED_TOKEN_IDS)._value.get()


async def test_requests_go_only_to_nodes_that_can_read_them_during_a_rolling_update(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, nodes=0, placement_policy="round-robin") as c:
        older = [await add_older(c, "decode-0"), await add_older(c, "decode-1")]
        for answer in (await c.chat(**ALLOWED), await c.complete(**ALLOWED, stream=True)):
            assert answer.status_code == 503
            assert answer.json()["error"] == LACKING
            assert int(answer.headers["retry-after"]) >= 1
        assert refused(c) == 2
        assert (await c.chat()).status_code == 200

        newer = await c.replace(older[0])
        for _ in range(4):
            for fields in (ALLOWED, {}, {}):
                assert (await c.chat(**fields)).status_code == 200
        assert given(newer).count(True) == 4
        assert given(older[1]) and not any(given(older[1]))

        last = await c.replace(older[1])
        for _ in range(2):
            assert (await c.chat(**ALLOWED)).status_code == 200
        assert any(given(last))
        assert refused(c) == 2


async def test_no_failure_moves_a_request_to_a_node_that_would_misread_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=1) as c:
        older = await add_older(c, "decode-older")
        c.node.script = unavailable
        answer = await c.chat(**ALLOWED)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unavailable"
        assert given(c.node) == [True] and older.requests == []
        assert (await c.chat()).status_code == 200
        assert given(older) == [False]


async def test_a_node_keeps_its_capabilities_when_it_joins_again(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=1) as c:
        await c.registry.Join(c.node.join_request(c.model))
        assert (await c.chat(**ALLOWED)).status_code == 200


async def test_capabilities_of_newer_nodes_are_unknown_here(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        await c.add("decode-0", capabilities=CAPABILITIES | {"x" * 5000})
        [info] = c.router.nodes.infos()
        assert set(info.capabilities) == CAPABILITIES


async def test_operators_see_which_nodes_lack_what_others_have(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        registry = f"127.0.0.1:{c.router.registry_port}"

        async def lacks() -> list[str]:
            table = admin.as_table(await asyncio.to_thread(admin.list_nodes, registry))
            heading, *rows = (line.split() for line in table.splitlines())
            assert heading[-2] == "LACKS"
            return [row[-2] for row in rows]

        await add_older(c, "decode-0")
        assert await lacks() == ["-"]
        await c.add("decode-1")
        assert await lacks() == [",".join(sorted(CAPABILITIES)), "-"]
