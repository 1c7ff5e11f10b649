"""Nodes that reject requests, fail, or disappear."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.tests.end_to_end.handoff.fault_proxy import BOTH, running_proxy
from tandem.tests.router.node_scripts import hang, refuse, silent, stuck
from tandem.tests.router.support import (
    admitted,
    cluster,
    events,
    finished,
    tokens_event,
    until,
    usage,
)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_the_node_keeps_its_status(tmp_path: Path, stream: bool) -> None:
    async with cluster(tmp_path) as c:
        details = json.dumps({"message": "no such thing", "param": "seed", "code": "bad"})
        c.node.script = refuse(grpc.StatusCode.INVALID_ARGUMENT, details)
        response = await c.chat(stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["message"], error["param"], error["code"]) == ("no such thing", "seed", "bad")
        c.node.script = refuse(grpc.StatusCode.INVALID_ARGUMENT, "plain words")
        assert (await c.chat(stream=stream)).json()["error"]["message"] == "plain words"
        c.node.script = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        response = await c.chat(stream=stream)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        c.node.script = refuse(grpc.StatusCode.INTERNAL, "trace of /secret")
        response = await c.chat(stream=stream)
        assert response.status_code == 500
        assert "secret" not in response.text


async def test_a_node_behind_a_black_hole_fails_its_requests_although_its_heartbeats_come(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as c:
        with running_proxy() as proxy:
            wire = proxy.wire()
            wire.target = "127.0.0.1", c.node.port
            address = f"127.0.0.1:{wire.port}"
            await c.registry.Join(c.node.join_request(c.model, address=address))
            c.node.script = silent
            work = asyncio.create_task(c.chat())
            await until(lambda: c.node.active == 1)
            wire.hole(*BOTH)
            async with asyncio.timeout(10):
                response = await work
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "unavailable"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 503),
        (grpc.StatusCode.INTERNAL, 500),
        (grpc.StatusCode.UNKNOWN, 500),
    ],
)
async def test_another_node_takes_what_one_refuses_or_fails_at(
    tmp_path: Path, code: grpc.StatusCode, status: int
) -> None:
    async with cluster(tmp_path, nodes=2) as c:
        c.nodes[0].script = refuse(code, "not me")
        for _ in range(4):
            assert (await c.chat()).status_code == 200
        c.nodes[1].script = refuse(code, "nor me")
        response = await c.chat()
        assert response.status_code == status
        assert ("retry-after" in response.headers) == (status == 503)


async def test_a_node_that_does_not_respond_is_skipped(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=2, admission_timeout=0.3) as c:
        c.nodes[0].script = hang
        assert (await c.chat()).status_code == 200
        c.nodes[1].script = hang
        assert (await c.chat()).status_code == 503
        await until(lambda: not any(node.active for node in c.nodes))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_node_that_dies_before_any_token_is_replaced(tmp_path: Path, stream: bool) -> None:
    async with cluster(tmp_path, nodes=2) as c:
        c.nodes[0].script = silent
        work = asyncio.create_task(c.chat(stream=stream))
        await until(lambda: c.nodes[0].active == 1)
        await c.nodes[0].stop()
        response = await work
        assert response.status_code == 200
        assert "hello" in response.text and "error" not in response.text


async def test_a_node_that_falls_silent_ends_its_streams(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=1, node_timeout=0.4) as c:
        c.node.script = stuck
        work = asyncio.create_task(c.chat(stream=True))
        await c.first_tokens()
        assert c.node.beat is not None
        c.node.beat.cancel()
        chunks = events((await work).text)
        assert chunks[-1]["error"]["code"] == "node_failed"
        assert (await c.client.get("/ready")).status_code == 503


@pytest.mark.parametrize("how", ["abort", "end", "error"])
async def test_a_failure_in_mid_stream_is_one_error_event(tmp_path: Path, how: str) -> None:
    async with cluster(tmp_path, nodes=2) as c:

        async def script(request: Any, context: Any) -> Any:
            yield admitted()
            yield tokens_event(0, [5])
            if how == "abort":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            if how == "error":
                yield finished(0, pb.FINISH_REASON_ERROR, error="logits are not finite")

        for node in c.nodes:
            node.script = script
        chunks = events((await c.chat(stream=True, max_tokens=9)).text)
        # Each node adds a token, unless the request ends without an error.
        tries = 1 if how == "end" else 4
        assert [("error" in event) for event in chunks] == [False] * (1 + tries) + [True]
        assert "[DONE]" not in chunks
        requests = sum(len(node.requests) for node in c.nodes)
        assert requests == tries
        response = await c.chat(max_tokens=9)
        assert response.status_code == (503 if how == "abort" else 500)
        assert ("retry-after" in response.headers) == (how == "abort")
        assert response.json()["error"]["type"] == "server_error"
        assert sum(len(node.requests) for node in c.nodes) == 2 * requests
        if how == "error":
            assert "finite" in response.json()["error"]["message"]


def dies_after(event: pb.GenerateEvent) -> Any:
    async def script(request: Any, context: Any) -> Any:
        yield admitted()
        yield usage(request, cached_tokens=99)
        yield event
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    return script


async def test_a_request_that_kills_its_nodes_is_not_passed_round(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=6) as c:
        for node in c.nodes:
            node.script = dies_after(usage(pb.GenerateRequest()))
        response = await c.chat()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert sum(len(node.requests) for node in c.nodes) == 2
        # A request that makes progress on each node ends at --migration-limit.
        for node in c.nodes:
            node.requests.clear()
            node.script = dies_after(tokens_event(0, [5]))
        response = await c.chat(max_tokens=9)
        assert response.status_code == 503
        assert [len(node.requests) for node in c.nodes if node.requests] == [1, 1, 1, 1]


async def test_prefill_nodes_that_die_count_as_much_as_decode_nodes(tmp_path: Path) -> None:
    died = pb.GenerateEvent(prefill_died=pb.PrefillDied(node_id="p"))
    async with cluster(tmp_path, nodes=4) as c:
        for node in c.nodes:
            node.script = dies_after(died)
        assert (await c.chat()).status_code == 503
        assert sum(len(node.requests) for node in c.nodes) == 1


async def test_the_next_node_gets_the_number_of_deaths(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=2) as c:
        c.nodes[0].script = dies_after(tokens_event(0, [5]))
        await c.complete(["hello"])
        await c.complete(["hello"])
        deaths = [request.deaths for node in c.nodes for request in node.requests]
        assert sorted(deaths)[-1] == 1


async def test_all_attempts_share_one_deadline(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=2, request_timeout=20.0, admission_timeout=0.5) as c:
        for node in c.nodes:
            node.script = hang
        assert (await c.chat()).status_code == 503
        first, second = sorted(
            (request.deadline_seconds for node in c.nodes for request in node.requests),
            reverse=True,
        )
        assert second <= first - 0.5 < first <= 20

        async def late(request: Any, context: Any) -> Any:
            yield admitted()
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "late")

        for node in c.nodes:
            node.script = late
        response = await c.chat()
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"


async def test_without_a_decode_node_the_response_is_503(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        assert (await c.client.get("/live")).status_code == 200
        assert (await c.client.get("/health")).status_code == 503
        assert (await c.client.get("/ready")).status_code == 503
        for response in (await c.chat(), await c.complete(), await c.client.get("/v1/models")):
            assert response.status_code == 503
            assert "retry-after" in response.headers
        node = await c.add()
        for path in ("/health", "/ready"):
            assert (await c.client.get(path)).status_code == 200
        assert (await c.chat()).status_code == 200
        await c.registry.Leave(pb.LeaveRequest(node_id=node.node_id, epoch=node.epoch))
        assert (await c.client.get("/ready")).status_code == 503
        assert (await c.client.get("/health")).status_code == 200
