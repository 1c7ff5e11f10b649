"""Nodes that refuse, fail and vanish; clients that disconnect or stall."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.capabilities import CAPABILITIES, STREAM
from tandem.tests.end_to_end.handoff.fault_proxy import BOTH, running_proxy
from tandem.tests.router.support import (
    Cluster,
    admitted,
    cluster,
    events,
    finished,
    logprobs,
    tokens_event,
    until,
    usage,
)

PATHS = ("/v1/chat/completions", "/v1/completions")


def refuse(code: grpc.StatusCode, details: str) -> Any:
    async def script(request: Any, context: Any) -> Any:
        await context.abort(code, details)
        yield

    return script


async def hang(request: Any, context: Any) -> Any:
    """A node that never answers."""
    await asyncio.sleep(60)
    yield


async def stuck(request: Any, context: Any) -> Any:
    """A node that sends one token, then nothing."""
    yield admitted()
    yield tokens_event(0, [5])
    await asyncio.sleep(60)


async def silent(request: Any, context: Any) -> Any:
    """A node that admits the request, then sends nothing."""
    yield admitted()
    await asyncio.sleep(60)


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


async def test_a_node_behind_a_black_hole_fails_its_calls_although_its_heartbeats_come(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as c:
        with running_proxy() as proxy:
            wire = proxy.wire()
            wire.target = "127.0.0.1", c.node.port
            address = f"127.0.0.1:{wire.port}"
            await c.registry.Join(c.node.join_request(c.model, address=address))
            c.node.script = silent
            answer = asyncio.create_task(c.chat())
            await until(lambda: c.node.active == 1)
            wire.hole(*BOTH)
            async with asyncio.timeout(10):
                response = await answer
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


async def test_a_node_that_does_not_answer_is_passed_over(tmp_path: Path) -> None:
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
        found = events((await work).text)
        assert found[-1]["error"]["code"] == "node_failed"
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
        found = events((await c.chat(stream=True)).text)
        assert [("error" in event) for event in found] == [False, False, True]
        assert "[DONE]" not in found
        # Nobody saw the tokens of a unary answer: it is tried on both nodes.
        asked = sum(len(node.requests) for node in c.nodes)
        response = await c.chat()
        assert response.status_code == (503 if how == "abort" else 500)
        assert ("retry-after" in response.headers) == (how == "abort")
        assert response.json()["error"]["type"] == "server_error"
        assert sum(len(node.requests) for node in c.nodes) - asked == (1 if how == "end" else 2)
        if how == "error":
            assert "finite" in response.json()["error"]["message"]


def dies_after(event: pb.GenerateEvent) -> Any:
    async def script(request: Any, context: Any) -> Any:
        yield admitted()
        yield usage(request, cached_tokens=99)
        yield event
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    return script


@pytest.mark.parametrize(
    "last",
    [
        tokens_event(0, [5, 6], 1),
        finished(1),
        pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(positions=[logprobs(9, 1)])),
    ],
    ids=["tokens", "one choice's end", "prompt logprobs"],
)
async def test_a_unary_request_begins_afresh_when_its_node_dies(
    tmp_path: Path, last: pb.GenerateEvent
) -> None:
    async with cluster(tmp_path, nodes=2) as c:
        fields = {"n": 2, "echo": True, "logprobs": 1, "return_token_ids": True}
        want = (await c.complete(["hello", "world"], **fields)).json()
        for node in c.nodes:
            node.requests.clear()
        c.nodes[0].script = dies_after(last)
        got = (await c.complete(["hello", "world"], **fields)).json()
        assert c.nodes[0].requests, "the dying node was never asked"
        assert got["choices"] == want["choices"]
        assert got["usage"] == want["usage"]
        assert got["tandem"]["decode_nodes"] == ["decode-1"]


async def test_a_request_that_kills_its_nodes_is_not_passed_round(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=4) as c:
        for node in c.nodes:
            node.script = dies_after(tokens_event(0, [5]))
        response = await c.chat()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert sum(len(node.requests) for node in c.nodes) == 2


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
        asked = [request.deaths for node in c.nodes for request in node.requests]
        assert sorted(asked)[-1] == 1


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


@pytest.mark.parametrize("phase", ["unanswered", "admitted", "streaming"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_goes_away_frees_the_node(
    tmp_path: Path, phase: str, stream: bool, path: str
) -> None:
    async with cluster(tmp_path) as c:
        c.node.script = {"unanswered": hang, "admitted": silent, "streaming": stuck}[phase]
        message = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
        body = message if "chat" in path else {"prompt": ["x", "y"], "stream": stream}
        writers = [await _send(c, path, body) for _ in range(3)]
        wanted = 3 if "chat" in path else 6
        await until(lambda: c.node.active == wanted)
        for writer in writers:
            writer.close()
        await until(lambda: c.node.active == 0)
        await until(lambda: c.router.app.handler.active == 0)
        assert all(node.inflight_calls == 0 for node in c.router.nodes)
        c.node.script = None
        assert (await c.chat()).status_code == 200


async def _send(c: Cluster, path: str, body: Any) -> asyncio.StreamWriter:
    sock = socket.socket()
    # Before connect, to have effect: a client that stops reading need not be sent megabytes first.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", c.router.http_port))
    _, writer = await asyncio.open_connection(sock=sock)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return writer


@pytest.mark.parametrize("capabilities", [CAPABILITIES, CAPABILITIES - {STREAM}])
async def test_a_reader_that_stalls_is_cut_off(
    tmp_path: Path, capabilities: frozenset[str]
) -> None:
    async with cluster(tmp_path, nodes=0, context=100_000, send_timeout=0.5) as c:
        node = await c.add(capabilities=capabilities)

        async def flood(request: Any, context: Any) -> Any:
            yield admitted()
            for _ in range(request.sampling.max_tokens // 100):
                yield tokens_event(0, [20] * 100, 20)
            await asyncio.sleep(60)

        node.script = flood
        body = {"prompt": "x", "stream": True, "max_tokens": 40_000, "logprobs": 20}
        writer = await _send(c, "/v1/completions", body)
        transport: Any = writer.transport
        transport.pause_reading()
        await until(lambda: node.active == 1)
        await until(lambda: node.active == 0)
        writer.close()


async def test_no_more_requests_than_the_limit(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_concurrent_requests=2) as c:
        c.node.script = stuck
        writers = [await _send(c, "/v1/completions", {"prompt": "x"}) for _ in range(2)]
        await until(lambda: c.node.active == 2)
        response = await c.chat()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        for writer in writers:
            writer.close()
        await until(lambda: c.router.app.handler.active == 0)
        c.node.script = None
        assert (await c.chat()).status_code == 200


async def test_no_more_connections_than_the_limit(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_connections=5) as c:
        held = [await asyncio.open_connection("127.0.0.1", c.router.http_port) for _ in range(5)]
        connections = c.router._http.connections
        await until(lambda: len(connections) == 5)
        reader, writer = await asyncio.open_connection("127.0.0.1", c.router.http_port)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        for _, held_writer in held:
            held_writer.close()
        writer.close()
        await until(lambda: not connections)
        assert (await c.client.get("/health")).status_code == 200


async def test_without_a_decode_node_the_answer_is_503(tmp_path: Path) -> None:
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


async def test_a_drain_lets_streams_finish_and_ends_the_rest(tmp_path: Path) -> None:
    async with cluster(tmp_path, drain_timeout=1.0) as c:

        async def finish(request: Any, context: Any) -> Any:
            yield admitted()
            yield tokens_event(0, [5])
            await until(lambda: c.router.app.services.draining)
            yield finished(0)

        c.node.script = finish
        finishing = asyncio.create_task(c.chat(stream=True))
        await c.first_tokens()
        c.node.script = stuck
        ended = asyncio.create_task(c.chat(stream=True))
        await c.first_tokens(2)
        stopping = asyncio.create_task(c.router.stop())
        assert events((await finishing).text)[-1] == "[DONE]"
        assert events((await ended).text)[-1]["error"]["code"] == "server_draining"
        await stopping
        assert 'status="500"' not in c.router.metrics.render().decode()
        await until(lambda: c.node.active == 0)


async def test_what_a_client_gets_waits_for_no_acknowledgement(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        connections: Any = c.router._http.connections
        with socket.create_connection(("127.0.0.1", c.router.http_port)):
            await until(lambda: bool(connections))
            (connection,) = connections
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_sigterm_lets_a_router_serve_for_its_delay_then_close_then_finish(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tandem.router")
    async with cluster(tmp_path, shutdown_delay=3600.0) as c:
        c.node.script = stuck
        running = asyncio.create_task(c.chat(stream=True))
        await c.first_tokens()
        c.node.script = None
        retiring = asyncio.create_task(c.router.retire())
        await until(lambda: c.router.app.services.draining)
        async with httpx.AsyncClient(base_url=c.url) as another:
            ready = await another.get("/ready")
            assert ready.status_code == 503 and ready.headers["retry-after"]
            assert ready.json()["error"]["code"] == "server_draining"
            answer = await c.chat()
            assert answer.status_code == 200
            assert answer.headers["connection"] == "close", "clients go elsewhere"
        retiring.cancel()  # the hour is over
        stopping = asyncio.create_task(c.router.stop())
        assert events((await running).text)[-1]["error"]["code"] == "server_draining"
        await stopping
        with pytest.raises(httpx.ConnectError):
            await c.client.get("/ready")
    await asyncio.gather(retiring, return_exceptions=True)
    said = [record.getMessage() for record in caplog.records]
    steps = ("stopping: no longer ready", "closing the listener; 1 requests have 1 s", "ended")
    assert [any(line.startswith(step) for line in said) for step in steps] == [True] * 3


@pytest.mark.parametrize("planned", [True, False])
async def test_a_client_can_tell_a_drained_node_from_a_crash(tmp_path: Path, planned: bool) -> None:
    async def ends(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        yield admitted()
        yield usage(request)
        yield tokens_event(0, [20])
        details = "this node is draining, and its time is over" if planned else "Socket closed"
        await context.abort(grpc.StatusCode.UNAVAILABLE, details)

    async with cluster(tmp_path) as c:
        c.node.script = ends
        error = events((await c.chat(stream=True)).text)[-1]["error"]
        assert error["code"] == ("node_draining" if planned else "node_failed")
        unary = await c.chat()
        assert unary.status_code == 503 and unary.headers["retry-after"]
        assert unary.json()["error"]["code"] == ("node_draining" if planned else "unavailable")
        assert ('status="500"' in c.router.metrics.render().decode()) != planned
