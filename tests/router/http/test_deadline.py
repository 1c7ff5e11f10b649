"""Deadlines that a header sets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.node_scripts import hang
from tandem.tests.router.support import admitted, cluster, events, tokens_event, until

CLIENTS, ENVOYS = "x-request-timeout", "x-envoy-expected-rq-timeout-ms"


@pytest.mark.parametrize(("header", "value"), [(CLIENTS, "0.3"), (ENVOYS, "300")])
async def test_a_request_ends_at_its_deadline(tmp_path: Path, header: str, value: str) -> None:
    async with cluster(tmp_path) as c:

        async def stall(request: Any, context: Any) -> Any:
            yield admitted()
            yield tokens_event(0, [1])
            await asyncio.Event().wait()

        c.node.script = stall
        late = {header: value}
        response = await c.client.post("/v1/completions", json={"prompt": "x"}, headers=late)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        body = {"prompt": "x", "stream": True}
        stream = await c.client.post("/v1/completions", json=body, headers=late)
        assert events(stream.text)[-1]["error"]["code"] == "deadline_exceeded"
        assert all(0 < request.deadline_seconds <= 0.3 for request in c.node.requests)
        await until(lambda: c.node.active == 0)


async def test_hundreds_of_requests_that_time_out_leave_room_for_the_next(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        good = (await c.complete()).json()["choices"]
        c.node.script = hang
        body, late = {"prompt": "x"}, {CLIENTS: "0.3"}
        requests = (c.client.post("/v1/completions", json=body, headers=late) for _ in range(300))
        responses = await asyncio.gather(*requests)
        assert {response.status_code for response in responses} == {504}
        await until(lambda: c.node.active == 0)
        handler = c.router.app.handler
        assert handler.active == handler.prompts.used == handler.responses.used == 0
        c.node.script = None
        assert (await c.complete()).json()["choices"] == good


async def test_a_body_that_is_late_ends_at_the_deadline_too(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.router.http_port)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-timeout: 0.2\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: 9\r\n\r\n".encode())
        assert b" 504 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()


async def test_the_shortest_limit_holds(tmp_path: Path) -> None:
    async with cluster(tmp_path, request_timeout=50.0) as c:
        body = {"prompt": "x"}
        for headers in (
            {},
            {CLIENTS: "900"},
            {CLIENTS: "20", ENVOYS: "90000"},
            {ENVOYS: "15000.5"},
        ):
            response = await c.client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200
        times = [round(request.deadline_seconds) for request in c.node.requests]
        assert times == [50, 50, 20, 15]


async def test_an_invalid_deadline_is_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for value in ("0", "-1", "soon", "nan", "inf", "1e400", "5s"):
            headers = {CLIENTS: value}
            response = await c.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert response.status_code == 400, value
            assert "is not a number of seconds above 0" in response.json()["error"]["message"]
