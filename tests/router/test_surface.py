"""A surface with another format than OpenAI's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, Response

from tandem.router import app
from tandem.router.errors import ApiError
from tandem.router.generation import ChoiceDelta, GenerationRequest
from tandem.router.openai.completion_request import parse_completion
from tandem.router.options import RouterOptions
from tandem.router.result import GenerationResult
from tandem.router.routes.responses import GenerationResponse
from tandem.router.routes.services import Exchange, RouterServices
from tandem.router.served_model import ServedModel
from tandem.router.surface import ResponseFormatter, Surface
from tandem.router.usage import Usage
from tandem.tests.router.support import cluster


class Plain(Surface):
    """A surface with named events, and errors with one field."""

    path = "/plain"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_completion(body, model, options)

    def formatter(self, request: GenerationRequest, created: int) -> PlainResponse:
        return PlainResponse()


class PlainErrors:
    def error_body(self, error: ApiError) -> Any:
        return {"plain_error": error.message}

    def error_event(self, error: ApiError) -> bytes:
        return f"event: failed\ndata: {error.message}\n\n".encode()


class PlainResponse(ResponseFormatter):
    def opening(self) -> bytes:
        return b"event: open\ndata:\n\n"

    def chunk(self, delta: ChoiceDelta) -> bytes:
        return f"event: text\ndata: {delta.text}\n\n".encode() if delta.text else b""

    def closing(self, usage: Usage) -> bytes:
        return f"event: usage\ndata: {usage.completion_tokens}\n\n".encode()

    def end_of_stream(self) -> bytes:
        return b"event: end\ndata:\n\n"

    def whole(self, result: GenerationResult) -> Any:
        return {"plain": [choice.text for choice in result.choices]}


router = APIRouter()


@router.post(Plain.path)
async def plain(exchange: Exchange, services: RouterServices) -> Response:
    return GenerationResponse(exchange, services.handler, Plain())


@pytest.fixture(autouse=True)
def with_the_surface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "APIS", (*app.APIS, app.Api(router, PlainErrors())))


async def test_a_surface_has_its_own_results_events_and_errors(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        whole = await c.client.post("/plain", json={"prompt": "hi", "n": 2})
        assert whole.json() == {"plain": ["hello world"] * 2}
        stream = await c.client.post("/plain", json={"prompt": "hi", "stream": True})
        blocks = [block.split("\n") for block in stream.text.split("\n\n") if block]
        names = [name.removeprefix("event: ") for name, _ in blocks]
        assert [*dict.fromkeys(names)] == ["open", "text", "usage", "end"]
        text = "".join(data.removeprefix("data: ") for name, data in blocks if "text" in name)
        assert text == "hello world"
        wrong = await c.client.post("/plain", json={"prompt": 5})
        assert wrong.status_code == 400 and list(wrong.json()) == ["plain_error"]
        other = await c.client.post("/v1/completions", json={"prompt": 5})
        assert list(other.json()) == ["error"]


async def test_a_failing_stream_ends_with_the_error_of_its_surface(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        c.node.delay = 0.01
        c.node.reply = c.encode("hello world ") * 20

        async with c.client.stream(
            "POST", "/plain", json={"prompt": "hi", "stream": True}
        ) as response:
            text = ""
            async for part in response.aiter_text():
                if not text:
                    c.router.app.handler.abort()
                text += part
        assert "event: failed\ndata: The server is stopping" in text
        assert "event: end" not in text
