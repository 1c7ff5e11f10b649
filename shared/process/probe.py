"""``/health``, ``/ready`` and ``/metrics``, for kubelets and Prometheus.

A node has no other HTTP, and a router's HTTP port is for its clients, so this is a few lines on
asyncio's server instead of a framework: one GET per connection, bounded in number, size and time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from ..errors import StartupError
from ..host_port import join_host_port

Page = bytes | Awaitable[bytes]

_LIMIT = 8192
_SECONDS = 5.0
# At once; each ends within a few seconds.
MAX_PROBES = 2048


class ProbeServer:
    """Serves the probes of one process, and answers ``/health`` before there are metrics to show.
    ``flag`` is the option that sets the port."""

    def __init__(self, flag: str = "--health-port") -> None:
        self._flag = flag
        self._unready: Callable[[], str] = lambda: "starting"
        self._metrics: Callable[[], Page] = lambda: b""
        self._server: asyncio.Server | None = None
        self._open = 0

    def show(self, unready: Callable[[], str], metrics: Callable[[], Page]) -> None:
        """Answer ``/ready`` and ``/metrics`` by these from now on; ``unready`` returns the reason
        why the process is not ready, or nothing."""
        self._unready = unready
        self._metrics = metrics

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises ``StartupError`` if it is taken."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_LIMIT)
        except OSError as error:
            raise StartupError(
                f"cannot listen on {join_host_port(host, port)} for probes: {error.strerror}; "
                f"choose another {self._flag}"
            ) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MAX_PROBES:
                await self._answer(reader, writer)
        finally:
            self._open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
        ):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _SECONDS)
            method, _, rest = head.partition(b" ")
            # Some probes send HEAD: they get the response to GET without its body.
            line = b"GET " + rest if method == b"HEAD" else head
            status, kind, body = await self._route(line)
            writer.write(
                f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n"
                f"connection: close\r\n\r\n".encode()
                + (b"" if method == b"HEAD" else body)
            )
            await asyncio.wait_for(writer.drain(), _SECONDS)

    async def _route(self, line: bytes) -> tuple[str, str, bytes]:
        text = "text/plain; charset=utf-8"
        if line.startswith(b"GET /health "):
            return "200 OK", text, b"alive\n"
        if line.startswith(b"GET /ready "):
            if reason := self._unready():
                return "503 Service Unavailable", text, f"not ready: {reason}\n".encode()
            return "200 OK", text, b"ready\n"
        if line.startswith(b"GET /metrics "):
            page = self._metrics()
            body = await page if isinstance(page, Awaitable) else page
            return "200 OK", "text/plain; version=0.0.4; charset=utf-8", body
        return "404 Not Found", text, b"try /health, /ready or /metrics\n"
