"""Requests about a stored response, passed on to the worker that has it.

Each worker also serves HTTP on a socket in a private folder, where the others reach it. The head of
a request goes there, so that its key is checked there too, and the response comes back as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httptools

PREFIX = "/v1/responses/"
CONNECT_SECONDS = 5.0
PIECE = 1 << 16
# Headers of one connection, which the other has its own of.
OF_CONNECTION = (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"upgrade")


def door_of(folder: Path, number: int) -> Path:
    """The socket of a worker."""
    return folder / f"worker-{number}.sock"


def open_door(folder: Path, number: int) -> socket.socket:
    """The socket on which this worker serves the others."""
    path = door_of(folder, number)
    path.unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind(str(path))
    door.listen(128)
    door.setblocking(False)
    return door


class Forwarding:
    """An application around ``app``. ``keeper_of`` gives the worker that has a response."""

    def __init__(self, app: Any, folder: Path, keeper_of: Callable[[str], int | None]) -> None:
        self._app = app
        self._folder = folder
        self._keeper_of = keeper_of

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path.startswith(PREFIX):
            number = self._keeper_of(path.removeprefix(PREFIX).partition("/")[0])
            if number is not None and await self._forward(number, scope, receive, send):
                return
        await self._app(scope, receive, send)

    async def _forward(self, number: int, scope: Any, receive: Any, send: Any) -> bool:
        """Pass a request on; false if the worker cannot be reached, and has lost the response."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_unix_connection(
                    str(door_of(self._folder, number))
                )
        except (OSError, TimeoutError):
            return False
        relay = asyncio.create_task(_relay(reader, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            writer.write(_head(scope))
            await asyncio.wait((relay, gone), return_when=asyncio.FIRST_COMPLETED)
            if relay.done():
                relay.result()
        finally:
            writer.close()
            for task in (relay, gone):
                task.cancel()
            await asyncio.gather(relay, gone, return_exceptions=True)
        return True


def _head(scope: Any) -> bytes:
    target = scope.get("raw_path") or scope["path"].encode()
    query = scope.get("query_string", b"")
    lines = [
        scope["method"].encode() + b" " + target + (b"?" + query if query else b"") + b" HTTP/1.1",
        *(name + b": " + value for name, value in scope["headers"] if name not in OF_CONNECTION),
        b"content-length: 0",
        b"connection: close",
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _relay(reader: asyncio.StreamReader, send: Any) -> None:
    """Send the response on as it arrives."""
    response = _RelayedResponse()
    parser = httptools.HttpResponseParser(response)
    while not response.complete:
        data = await reader.read(PIECE)
        if not data:
            break
        with contextlib.suppress(httptools.HttpParserUpgrade):
            parser.feed_data(data)
        for message in response.take(parser.get_status_code):
            await send(message)
    await send({"type": "http.response.body", "body": b""})


class _RelayedResponse:
    """The callbacks of the parser, as messages of ASGI."""

    def __init__(self) -> None:
        self.complete = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._started = self._head_done = False
        self._pieces: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in (b"connection", b"keep-alive", b"transfer-encoding"):
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._head_done = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = True

    def take(self, status: Callable[[], int]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self._head_done and not self._started:
            self._started = True
            start = {"type": "http.response.start", "status": status(), "headers": self._headers}
            messages.append(start)
        if self._pieces:
            body = {
                "type": "http.response.body",
                "body": b"".join(self._pieces),
                "more_body": True,
            }
            messages.append(body)
            self._pieces = []
        return messages
