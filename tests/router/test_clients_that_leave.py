"""Clients that disconnect or stall, and more connections than the limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.node_scripts import PATHS, hang, silent, stuck
from tandem.tests.router.support import Cluster, admitted, cluster, tokens_event, until


@pytest.mark.parametrize("phase", ["unanswered", "admitted", "streaming"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_disconnected_client_frees_the_node(
    tmp_path: Path, phase: str, stream: bool, path: str
) -> None:
    async with cluster(tmp_path) as c:
        c.node.script = {"unanswered": hang, "admitted": silent, "streaming": stuck}[phase]
        message = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
        body = message if "chat" in path else {"prompt": ["x", "y"], "stream": stream}
        writers = [await _send(c, path, body) for _ in range(3)]
        tokens = 3 if "chat" in path else 6
        await until(lambda: c.node.active == tokens)
        for writer in writers:
            writer.close()
        await until(lambda: c.node.active == 0)
        await until(lambda: c.router.app.handler.active == 0)
        assert all(node.inflight_requests == 0 for node in c.router.nodes)
        c.node.script = None
        assert (await c.chat()).status_code == 200


async def _send(c: Cluster, path: str, body: Any) -> asyncio.StreamWriter:
    sock = socket.socket()
    # Takes effect only before connect. With a small buffer, a stalled client need not get megabytes
    # first.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", c.router.http_port))
    _, writer = await asyncio.open_connection(sock=sock)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return writer


async def test_a_reader_that_stalls_is_cut_off(tmp_path: Path) -> None:
    async with cluster(tmp_path, context=100_000, send_timeout=0.5) as c:

        async def flood(request: Any, context: Any) -> Any:
            yield admitted()
            for _ in range(request.sampling.max_tokens // 100):
                yield tokens_event(0, [20] * 100, 20)
            await asyncio.sleep(60)

        c.node.script = flood
        body = {"prompt": "x", "stream": True, "max_tokens": 40_000, "logprobs": 20}
        writer = await _send(c, "/v1/completions", body)
        transport: Any = writer.transport
        transport.pause_reading()
        await until(lambda: c.node.active == 1)
        await until(lambda: c.node.active == 0)
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
        streams = [await asyncio.open_connection("127.0.0.1", c.router.http_port) for _ in range(5)]
        connections = c.router._http.connections
        await until(lambda: len(connections) == 5)
        reader, writer = await asyncio.open_connection("127.0.0.1", c.router.http_port)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        for _, each in streams:
            each.close()
        writer.close()
        await until(lambda: not connections)
        assert (await c.client.get("/health")).status_code == 200


async def test_what_a_client_gets_waits_for_no_acknowledgement(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        connections: Any = c.router._http.connections
        with socket.create_connection(("127.0.0.1", c.router.http_port)):
            await until(lambda: bool(connections))
            (connection,) = connections
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
