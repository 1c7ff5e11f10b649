"""``/health``, ``/ready`` and ``/metrics``, for kubelets and Prometheus.

A node has no other HTTP, and a router's HTTP port is for its clients, so this is a few lines on
asyncio's streams instead of a framework: one GET per connection, bounded in number, size and time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from ..errors import StartupError
from ..host_port import join_host_port
from .acceptor import Acceptor, listen
from .open_files import open_file_limit

Page = bytes | Awaitable[bytes]

_LIMIT = 8192
_SECONDS = 5.0
# Concurrent probes, at most a sixteenth of the open-file limit; each ends within a few seconds.
MAX_PROBES = 2048
PART_OF_FILES = 16
BACKLOG = 128


class ProbeServer:
    """Serves the probes of one process: at first only ``/health``, the rest after ``show``.

    ``flag`` is the option that sets the port."""

    def __init__(self, flag: str = "--health-port") -> None:
        self._flag = flag
        self._unready: Callable[[], str] = lambda: "starting"
        self._metrics: Callable[[], Page] = lambda: b""
        self._acceptor: Acceptor | None = None
        self._open: set[asyncio.Task[None]] = set()

    def show(self, unready: Callable[[], str], metrics: Callable[[], Page]) -> None:
        """Set the content of ``/ready`` and ``/metrics``. ``unready`` returns the reason why the
        process is not ready; empty if it is."""
        self._unready = unready
        self._metrics = metrics

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises ``StartupError`` if it is taken."""
        try:
            listener = listen(host, port, BACKLOG)
        except OSError as error:
            raise StartupError(
                f"cannot listen on {join_host_port(host, port)} for probes: {error.strerror}; "
                f"choose another {self._flag}"
            ) from None
        self._acceptor = Acceptor(listener, self._take, "a probe")
        self._acceptor.start()
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        if self._acceptor is not None:
            self._acceptor.stop()

    def _take(self, accepted: socket.socket) -> None:
        if len(self._open) >= min(MAX_PROBES, open_file_limit() // PART_OF_FILES):
            accepted.close()
            return
        task = asyncio.create_task(self._serve(accepted))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, accepted: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=accepted, limit=_LIMIT)
        try:
            await self._respond(reader, writer)
        finally:
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
        ):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _SECONDS)
            method, _, rest = head.partition(b" ")
            # Some probes send HEAD: the response to GET, without its body.
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
