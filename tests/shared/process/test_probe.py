"""The probes of a node, requested by kubelets and strangers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tandem.shared.errors import StartupError
from tandem.shared.process import probe
from tandem.shared.process.probe import ProbeServer


class ProbedNode:
    ready = False


@pytest.fixture
async def node_and_port() -> AsyncIterator[tuple[ProbedNode, int]]:
    node = ProbedNode()
    server = ProbeServer()
    port = await server.start("127.0.0.1", 0)
    assert (await ask(port, get("/health"))).startswith(b"HTTP/1.1 200 ")
    assert (await ask(port, get("/ready"))).startswith(b"HTTP/1.1 503 ")
    assert (await ask(port, get("/metrics"))).endswith(b"\r\n\r\n")
    server.show(lambda: "" if node.ready else "it loads", lambda: b"tandem_transfers_live 0.0\n")
    yield node, port
    await server.stop()


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


async def test_a_node_is_alive_before_it_is_ready(node_and_port: tuple[ProbedNode, int]) -> None:
    node, port = node_and_port
    assert (await ask(port, get("/health"))).startswith(b"HTTP/1.1 200 ")
    assert (await ask(port, get("/ready"))).startswith(b"HTTP/1.1 503 ")
    node.ready = True
    assert (await ask(port, get("/ready"))).startswith(b"HTTP/1.1 200 ")


async def test_metrics_are_prometheus_text(node_and_port: tuple[ProbedNode, int]) -> None:
    head, _, body = (await ask(node_and_port[1], get("/metrics"))).partition(b"\r\n\r\n")
    assert b"version=0.0.4" in head
    assert body == b"tandem_transfers_live 0.0\n"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/"])
async def test_head_is_get_without_its_body(
    node_and_port: tuple[ProbedNode, int], path: str
) -> None:
    port = node_and_port[1]
    whole = await ask(port, get(path))
    head = await ask(port, get(path).replace(b"GET", b"HEAD"))
    assert head == whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


@pytest.mark.parametrize("path", ["/", "/healthy", "/../health", "/ready?x"])
async def test_other_paths_are_404(node_and_port: tuple[ProbedNode, int], path: str) -> None:
    assert (await ask(node_and_port[1], get(path))).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(
    "request_bytes", [b"GET /health" + b"x" * 100_000, b"\x16\x03\x01\r\n\r\n", b"\r\n\r\n"]
)
async def test_garbage_is_cut_off_and_the_next_probe_gets_a_response(
    node_and_port: tuple[ProbedNode, int], request_bytes: bytes
) -> None:
    _, port = node_and_port
    assert b"200" not in await ask(port, request_bytes)
    assert (await ask(port, get("/health"))).startswith(b"HTTP/1.1 200 ")


async def test_a_silent_client_is_disconnected(
    node_and_port: tuple[ProbedNode, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.shared.process.probe._SECONDS", 0.05)
    assert await ask(node_and_port[1], b"GET /hea") == b""


async def test_a_port_in_use_is_a_startup_error(node_and_port: tuple[ProbedNode, int]) -> None:
    _, port = node_and_port
    with pytest.raises(StartupError, match=f"{port}.*--health-port"):
        await ProbeServer().start("127.0.0.1", port)


async def test_connections_beyond_the_limit_are_closed_at_once(
    node_and_port: tuple[ProbedNode, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MAX_PROBES", 2)
    _, port = node_and_port
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    refused, _ = silent[-1]
    assert await refused.read() == b""
    for reader, writer in silent:
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    assert (await ask(port, get("/health"))).startswith(b"HTTP/1.1 200 ")
