"""A pool of connections to one server."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ...shared.errors import UsageError
from ...shared.host_port import join_host_port
from .connection import ExchangeFailed, HttpConnection, OnBody

CONNECT_SECONDS = 30.0
# Maximum size of a response that is read as a whole: an error, or a list of tokens.
MAX_WHOLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """The host of all requests, and the common prefix of their paths."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None

    @classmethod
    def of_url(cls, url: str, *, insecure: bool = False) -> Target:
        """Parse a URL. Raises ``UsageError`` unless it is an http or https URL."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")
        except ValueError as error:
            raise UsageError(f"--base-url {url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise UsageError(f"--base-url {url!r} is not a URL such as http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        tls = _tls(insecure) if secure else None
        return cls(host, port or (443 if secure else 80), parts.path.rstrip("/"), tls)

    @property
    def authority(self) -> str:
        return join_host_port(self.host, self.port)


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


@dataclass(slots=True)
class HttpClient:
    """Sends requests with ``headers`` to one target."""

    target: Target
    headers: Mapping[str, str] = field(default_factory=dict)
    _idle: list[HttpConnection] = field(default_factory=list)
    # The resolved address: resolving the name again, in a thread, would delay requests.
    _address: str = ""

    def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """A request as bytes. Raises ``UsageError`` for an invalid header."""
        lines = [f"{method} {self.target.path}{path} HTTP/1.1", f"host: {self.target.authority}"]
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        for name, value in {**self.headers, **headers}.items():
            if not name or not f"{name}{value}".isprintable() or set(name) & set(" :"):
                raise UsageError(f"--header {name}={value!r} is not a header")
            lines.append(f"{name}: {value}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def send(self, request: bytes, on_body: OnBody) -> HttpConnection:
        """Send a request, and return the connection once the response is complete.

        If the server has closed an idle connection, another one is used.
        """
        while self._idle:
            try:
                return await self._exchange(self._idle.pop(), request, on_body)
            except ExchangeFailed as error:
                if not error.untouched:
                    raise
        return await self._exchange(await self._connect(), request, on_body)

    async def whole(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float
    ) -> tuple[int, bytes]:
        """Status and body of a short response. Raises ``ExchangeFailed``, ``OSError`` and
        ``TimeoutError``."""
        parts: list[bytes] = []
        request = self.request(method, path, json.dumps(body).encode() if body else b"", {})
        async with asyncio.timeout(seconds):
            connection = await self.send(request, bounded(parts))
        return connection.status, b"".join(parts)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(
        self, connection: HttpConnection, request: bytes, on_body: OnBody
    ) -> HttpConnection:
        try:
            await connection.exchange(request, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return connection

    async def _connect(self) -> HttpConnection:
        loop, target = asyncio.get_running_loop(), self.target
        async with asyncio.timeout(CONNECT_SECONDS):
            transport, connection = await loop.create_connection(
                HttpConnection,
                self._address or target.host,
                target.port,
                ssl=target.tls,
                server_hostname=target.host if target.tls else None,
            )
        self._address = transport.get_extra_info("peername")[0]
        return connection


def bounded(parts: list[bytes]) -> OnBody:
    """Collect a body, which must not be larger than ``MAX_WHOLE_BYTES``."""
    size = 0

    def add(data: bytes, _: float) -> None:
        nonlocal size
        size += len(data)
        if size > MAX_WHOLE_BYTES:
            raise ExchangeFailed(f"the response is larger than {MAX_WHOLE_BYTES >> 20} MiB")
        parts.append(data)

    return add
