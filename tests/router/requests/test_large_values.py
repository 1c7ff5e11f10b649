"""Large and deeply nested values in bodies of every API: rejected with the field's name, or
served without blocking other threads for long."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.router.http.json_body import MAX_PARTS
from tandem.router.requests import json_size
from tandem.router.requests.call_arguments import read_arguments
from tandem.router.requests.json_size import fits, json_text
from tandem.tests.router.support import cluster, held_briefly

JSON = {"content-type": "application/json"}
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"messages": HI}
RESPONSE: dict[str, Any] = {"input": "hi"}
MESSAGE: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "messages": HI}
OLLAMA: dict[str, Any] = {"model": "tiny", "messages": HI}
LONG = "x" * (600 * 1024)
NUMBERS = list(range(140_000))
BEAMS: dict[str, Any] = {"use_beam_search": True, "temperature": 0, "n": 33}


def function(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


HUGE = function({"description": 2 * LONG})
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": NUMBERS}}}
# Path, body, and words of the error.
LARGE: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/responses", {"input": [{"type": "mcp_list_tools"}] * 16_385}, "'input'"),
    ("/v1/responses", RESPONSE | {"user": LONG}, "'user'"),
    ("/v1/responses", RESPONSE | {"tool_choice": {"x": LONG}}, "'tool_choice'"),
    ("/v1/responses", RESPONSE | {"text": {"format": {"x": LONG}}}, "'text'"),
    ("/v1/responses", RESPONSE | {"tools": [{"type": "function", "x": LONG}]}, "'tools'"),
    ("/v1/chat/completions", CHAT | {"tools": [HUGE]}, "'tools'"),
    ("/v1/chat/completions", CHAT | {"functions": [HUGE["function"]]}, "'functions'"),
    ("/v1/chat/completions", CHAT | {"response_format": FORMAT}, "'response_format'"),
    ("/v1/chat/completions", CHAT | {"stop": ["x"] * 10_000}, "'stop'"),
    ("/v1/chat/completions", CHAT | BEAMS, "'n'"),
    (
        "/v1/chat/completions",
        CHAT | {"logit_bias": dict.fromkeys(map(str, range(10_000)), 1)},
        "'logit_bias'",
    ),
    (
        "/v1/messages",
        MESSAGE | {"tools": [{"name": "f", "input_schema": {"description": 2 * LONG}}]},
        "'tools'",
    ),
    ("/v1/messages", MESSAGE | {"stop_sequences": ["x"] * 10_000}, "'stop_sequences'"),
    ("/api/chat", OLLAMA | {"tools": [HUGE]}, "'tools'"),
    ("/api/chat", OLLAMA | {"options": {"stop": ["x"] * 10_000}}, "'options.stop'"),
    ("/api/chat", OLLAMA | {"format": {"enum": NUMBERS}}, "'format'"),
    ("/tokenize", CHAT | {"tools": [HUGE]}, "'tools'"),
)


async def test_large_values_are_rejected_by_name(tmp_path: Path) -> None:
    async with cluster(tmp_path, context=131_072) as c:
        for path, body, words in LARGE:
            content = json.dumps(body)
            send = partial(httpx.post, content=content, headers=JSON, timeout=60, verify=False)
            response = await held_briefly(partial(send, c.url + path))
            assert response.status_code == 400, (path, response.text)
            assert words in response.text and len(response.text) < 1000, response.text


SCHEMA = {"in": "place of a schema"}


def with_depth(body: Any, depth: int) -> str:
    """JSON with a schema of this depth, which ``json`` may be unable to encode."""
    schema = '{"properties":' * depth + "{}" + "}" * depth
    return json.dumps(body).replace(json.dumps(SCHEMA), schema)


DEEP: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT | {"tools": [function(SCHEMA)]}),
    ("/v1/responses", RESPONSE | {"user": SCHEMA}),
    ("/v1/messages", MESSAGE | {"tools": [{"name": "f", "input_schema": SCHEMA}]}),
    ("/api/chat", OLLAMA | {"stream": False, "tools": [function(SCHEMA)]}),
    ("/tokenize", CHAT | {"tools": [function(SCHEMA)]}),
)
DEPTHS = ((60, 200), (130, 400), (700, 400), (955, 400), (970, 400), (985, 400))


async def test_deep_values_are_rejected_before_anything_reads_them(tmp_path: Path) -> None:
    async with cluster(tmp_path, context=8192) as c:
        for depth, status in DEPTHS:
            for path, body in DEEP:
                content = with_depth(body, depth)
                response = await c.client.post(path, content=content, headers=JSON)
                assert response.status_code == status, (depth, path, response.text)
                assert status == 200 or "nested too deeply" in response.text
            arguments = with_depth(SCHEMA, depth)
            call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
            response = await c.client.post("/v1/responses", json={"input": [call, *HI]})
            assert response.status_code == 200, (depth, response.text)


def test_texts_of_json_have_the_bounds_of_bodies() -> None:
    assert read_arguments(json.dumps({"a": NUMBERS})) == {"a": NUMBERS}
    assert read_arguments(json.dumps([{}] * MAX_PARTS)) == read_arguments('{"a": "\\ud800"}') == {}


def test_the_text_of_a_large_value_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"é": [1, 2.5, None, True, "x\n"], "b": {}, "c": []}
    size = next(limit for limit in range(99) if fits(value, limit))
    assert size == len("ébcx\n") + 4 + 5 + 3
    monkeypatch.setattr(json_size, "MAX_IN_C", size - 1)
    assert json_text(value) == json.dumps(value, ensure_ascii=False)
