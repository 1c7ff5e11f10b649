"""HTTP connections: host names, pipelined requests, idle connections."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.router.access.hosts import AllowedHosts
from tandem.router.http import protocol
from tandem.router.options import RouterOptions
from tandem.tests.router.support import Cluster, admitted, cluster, finished, tokens_event, until

JSON = "content-type: application/json\r\n"


def post(body: Any, host: str = "localhost") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\n{JSON}content-length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


async def talk(c: Cluster, release: asyncio.Event) -> None:
    """A script that pauses in the middle until ``release``."""

    async def script(request: Any, context: Any) -> Any:
        yield admitted()
        yield tokens_event(0, c.encode("hello"))
        await release.wait()
        yield tokens_event(0, c.encode(" world"))
        yield finished(0)

    c.node.script = script


# Bytes after a request that are not another request.
LATER = {
    "garbage": b"\x16\x03\x01 garbage\r\n\r\n",
    "half a head": b"GET /hea",
    "a head that is too large": b"GET / HTTP/1.1\r\nlong: " + b"x" * 10_000,
}


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("later", LATER)
async def test_nothing_is_written_into_a_running_response(
    tmp_path: Path, later: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.1)
    async with cluster(tmp_path, header_timeout=0.5, max_header_bytes=4096) as c:
        await talk(c, asyncio.Event())
        reader, writer = await asyncio.open_connection("127.0.0.1", c.router.http_port)
        writer.write(post({"prompt": "x", "stream": stream}))
        await until(lambda: c.node.active == 1)
        if stream:
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        writer.write(LATER[later])
        async with asyncio.timeout(10):
            rest = await reader.read()
        assert b"HTTP/1.1" not in rest and b"error" not in rest
        await until(lambda: c.node.active == 0)
        writer.close()


async def test_a_whole_request_may_follow_a_running_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        release = asyncio.Event()
        await talk(c, release)
        reader, writer = await asyncio.open_connection("127.0.0.1", c.router.http_port)
        writer.write(post({"prompt": "x"}) + post({"prompt": "y"}))
        await until(lambda: c.node.active == 1)
        release.set()
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            assert b"hello world" in await reader.readexactly(length)
        writer.close()


async def test_a_broken_body_is_still_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.router.http_port)
        head = f"POST /v1/completions HTTP/1.1\r\n{JSON}transfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        await until(lambda: c.router.app.handler.active == 1)
        writer.write(b"no chunk\r\n")
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_a_connection_without_a_request_is_closed_without_a_response(tmp_path: Path) -> None:
    async with cluster(tmp_path, header_timeout=0.3) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.router.http_port)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


OWN = ["", "localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "10.0.0.1", "a.localhost"]
FOREIGN = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil"]


def allowed(name: str, **options: Any) -> bool:
    try:
        AllowedHosts(RouterOptions(**options)).check(name.encode())
    except Exception:
        return False
    return True


@pytest.mark.parametrize("name", OWN)
def test_addresses_and_localhost_are_allowed_everywhere(name: str) -> None:
    assert allowed(name)
    assert allowed(name, allowed_hosts="llm.example")


@pytest.mark.parametrize("name", FOREIGN)
def test_other_names_reach_no_open_api_on_loopback(name: str) -> None:
    assert not allowed(name)
    assert not allowed(name, allowed_hosts="llm.example", api_key="secret")
    for options in ({"host": "0.0.0.0"}, {"api_key": "secret"}, {"allowed_hosts": "*"}):
        assert allowed(name, **options)


def test_a_name_may_be_allowed() -> None:
    options = {"allowed_hosts": "llm.example, LLM.internal"}
    assert allowed("llm.example:443", **options) and allowed("llm.internal.", **options)


async def test_a_page_of_another_name_gets_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        headers = {"host": "evil.example"}
        for path in ("/", "/v1/models", "/metrics"):
            rejection = await c.client.get(path, headers=headers)
            assert rejection.status_code == 403
            assert "--allowed-hosts evil.example" in rejection.json()["error"]["message"]
        assert (await c.client.get("/ready", headers=headers)).status_code == 200
        body = {"prompt": "x"}
        assert (await c.client.post("/v1/completions", json=body)).status_code == 200
        rejection = await c.client.post("/v1/completions", json=body, headers=headers)
        assert rejection.status_code == 403 and len(c.node.requests) == 1


async def test_tiny_requests_are_read_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = []
    original = protocol.BoundedProtocol.data_received

    def data_received(self: protocol.BoundedProtocol, data: bytes) -> None:
        sizes.append(len(data))
        original(self, data)

    monkeypatch.setattr(protocol.BoundedProtocol, "data_received", data_received)
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.1)
    async with cluster(tmp_path, nodes=0) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.router.http_port)
        # More bytes at once than the limit of a head.
        count = 300
        head = b"GET /live HTTP/1.1\r\nhost: localhost\r\nlong: " + b"x" * 300 + b"\r\n\r\n"
        writer.write(head * count)
        for _ in range(count):
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"}")
        # A head that is too large ends the connection, including the requests that wait before it.
        writer.write(head * count + b"GET / HTTP/1.1\r\nlong: " + b"x" * 70_000)
        assert (await reader.read()).count(b"200 OK") < count
        writer.close()
        await c.client.get("/live")
    assert max(sizes) <= protocol.READ_BYTES and sum(sizes) > 3 * protocol.READ_BYTES
    assert not caplog.records


async def test_a_long_query_is_rejected(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        response = await c.client.get("/v1/models?" + "a=&" * 3000)
        assert response.status_code == 414
        assert response.json()["error"]["code"] == "query_too_long"


async def test_a_client_that_leaves_behind_a_pipelined_request_ends_the_first(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as c:
        await talk(c, asyncio.Event())
        reader, writer = await asyncio.open_connection(*c.url.removeprefix("http://").split(":"))
        writer.write(post({"prompt": "hi", "stream": True}))
        await reader.readuntil(b"hello")
        writer.write(post({"prompt": "hi"}))
        await until(lambda: any(each.pipeline for each in c.router._http.connections))
        writer.transport.abort()
        await until(lambda: c.router.app.handler.active == 0)
