"""An OpenAI-compatible server without a model, in the test's own event loop.

A word is a token, whose id is its number among all words seen. ``delay`` seconds lie between
tokens.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tandem.bench.client.api_server import ApiServer, api_server

CHAT = "/v1/chat/completions"


@dataclass
class FakeApi:
    """Records requests. ``statuses`` are the responses to the next ones, one each."""

    delay: float = 0.0
    tokenizes: bool = True
    reports_ids: bool = False
    close_after: bool = False
    statuses: list[tuple[int, str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    connections: int = 0
    tls: ssl.SSLContext | None = None
    port: int = 0
    words: dict[str, int] = field(default_factory=dict)

    def server(self, **more: Any) -> ApiServer:
        """The client's side."""
        options = {"backend": "openai", "endpoint": None, "header": (), "insecure": False} | more
        scheme = "https" if self.tls else "http"
        return api_server(url=f"{scheme}://127.0.0.1:{self.port}", **options)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await _head(reader):
                self.heads.append(head)
                method, path, _ = head.split(" ", 2)
                body = await reader.readexactly(_length(head)) if method == "POST" else b""
                await self._respond(writer, path, json.loads(body or b"{}"))
                await writer.drain()
                if self.close_after:
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client, or the test, has ended
        finally:
            writer.close()

    async def _respond(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        if path == "/v1/models":
            _whole(writer, 200, {"data": [{"id": "fake"}]})
        elif path == "/tokenize" and self.tokenizes:
            _whole(writer, 200, {"tokens": self._tokens(body)})
        elif path not in ("/v1/completions", CHAT):
            _whole(writer, 404, {"detail": "Not Found"})
        elif self.statuses:
            status, message = self.statuses.pop(0)
            _whole(writer, status, {"error": {"message": message}})
        else:
            self.bodies.append(body)
            await self._stream(writer, body)

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        chat = "messages" in body
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        if chat:
            _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        count = body.get("max_tokens") or body["max_completion_tokens"]
        for number in range(count):
            await asyncio.sleep(self.delay)
            text = f" {number}"
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            if self.reports_ids:
                choice["token_ids"] = [number]
            choice["finish_reason"] = "length" if number == count - 1 else None
            _event(writer, {"choices": [{"index": 0, **choice}]})
        prompt = len(self._tokens(body)) + 3 * chat
        usage = {"prompt_tokens": prompt, "completion_tokens": count}
        _event(writer, {"choices": [], "usage": usage, "tandem": {"remote_tokens": prompt - 1}})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt") or body["messages"][0]["content"]
        if not isinstance(prompt, str):
            return prompt
        return [self.words.setdefault(word, len(self.words)) for word in prompt.split()]


@asynccontextmanager
async def fake_api(**settings: Any) -> AsyncIterator[FakeApi]:
    """A running fake server."""
    api = FakeApi(**settings)
    server = await asyncio.start_server(api.serve, "127.0.0.1", 0, ssl=api.tls)
    api.port = server.sockets[0].getsockname()[1]
    try:
        yield api
    finally:
        server.close()


async def _head(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return ""


def _length(head: str) -> int:
    return int(head.partition("content-length: ")[2].split("\r\n")[0])


def _whole(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode())
    writer.write(content)


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
