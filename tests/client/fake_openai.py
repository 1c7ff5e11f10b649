"""A server with OpenAI's API as a function, without sockets and threads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tandem.client.openai_server import OpenAIServer
from tandem.shared.config.client import ConnectionConfig

Reply = Callable[[dict[str, Any]], Any]


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def words(text: str) -> Iterator[dict[str, Any]]:
    """The events of a chat's reply, a word at a time."""
    for word in text.split(" "):
        yield delta(content=word + " ")
    yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    yield {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(text.split())}}


class FakeStream(httpx.SyncByteStream):
    """Server-sent events; an event that is an exception is raised."""

    def __init__(self, events: Any) -> None:
        self._events = events
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        for event in self._events:
            if isinstance(event, BaseException):
                raise event
            yield f"data: {json.dumps(event)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def close(self) -> None:
        self.closed = True


class FakeOpenAI:
    """Records bodies; ``reply`` makes the events of each, or a response."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.streams: list[FakeStream] = []
        self.headers: httpx.Headers | None = None

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.headers = request.headers
        self.paths.append(request.url.path)
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "m"}, {"id": "other"}]})
        body = json.loads(request.content)
        self.bodies.append(body)
        response = self.reply(body)
        if isinstance(response, httpx.Response):
            return response
        self.streams.append(FakeStream(response))
        return httpx.Response(200, stream=self.streams[-1])

    def server(self, **config: Any) -> OpenAIServer:
        return OpenAIServer(ConnectionConfig(**config), httpx.MockTransport(self.handle))
