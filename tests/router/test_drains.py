"""Draining a router and its nodes: running requests may finish, and clients get an error code."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.tests.router.node_scripts import stuck
from tandem.tests.router.support import (
    admitted,
    cluster,
    events,
    finished,
    tokens_event,
    until,
    usage,
)


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
        assert 'tandem_request_errors_total{status="500"} 0.0' in c.router.metrics.render().decode()
        await until(lambda: c.node.active == 0)


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
            response = await c.chat()
            assert response.status_code == 200
            assert response.headers["connection"] == "close", "clients go elsewhere"
        retiring.cancel()  # the hour is over
        stopping = asyncio.create_task(c.router.stop())
        assert events((await running).text)[-1]["error"]["code"] == "server_draining"
        await stopping
        with pytest.raises(httpx.ConnectError):
            await c.client.get("/ready")
    await asyncio.gather(retiring, return_exceptions=True)
    messages = [record.getMessage() for record in caplog.records]
    steps = ("stopping: no longer ready", "closing the listener; 1 requests have 1 s", "ended")
    assert [any(line.startswith(step) for line in messages) for step in steps] == [True] * 3


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
        failed = 'tandem_request_errors_total{status="500"} 1.0'
        assert (failed in c.router.metrics.render().decode()) != planned


async def test_a_request_outlives_nodes_that_drain_one_after_the_other(tmp_path: Path) -> None:
    """As in a rolling restart. If the nodes crashed instead, the second one would end the
    request."""
    requests: list[pb.GenerateRequest] = []

    async def ends(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        requests.append(request)
        yield admitted()
        yield usage(request)
        if len(requests) <= 2:
            details = "this node is draining, and its time is over"
            await context.abort(grpc.StatusCode.UNAVAILABLE, details)
        yield tokens_event(0, [20])
        yield finished(0)

    async with cluster(tmp_path, nodes=3) as c:
        for node in c.nodes:
            node.script = ends
        assert (await c.chat()).status_code == 200
    assert [request.deaths for request in requests] == [0, 0, 0]
