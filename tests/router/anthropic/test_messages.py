"""POST /v1/messages: text, in Anthropic's shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.http import keep_alive
from tandem.tests.router.in_process import CHAT, MESSAGES, InProcess, Response
from tandem.tests.router.support import CONTEXT, admitted, cluster, tokens_event

HI: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 20,
    "messages": [{"role": "user", "content": "hi"}],
}


JSON: dict[str, Any] = {"type": "json_schema", "schema": {"type": "object"}}


def prefilled(text: str) -> list[dict[str, Any]]:
    """A conversation whose last message the reply continues."""
    return [*HI["messages"], {"role": "assistant", "content": text}]


def body(**fields: Any) -> dict[str, Any]:
    """A body with these fields, without those that are ``...``."""
    return {name: value for name, value in (HI | fields).items() if value is not ...}


def post_message(c: InProcess, **fields: Any) -> Response:
    return c.respond(MESSAGES, body(**fields))


def named_events(text: str) -> list[dict[str, Any]]:
    """The data of a stream's events, each of which has its type as its name."""
    events = []
    for block in text.split("\n\n"):
        if block:
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def usage(prompt: int, cached: int, output: int) -> dict[str, Any]:
    absent = ("cache_creation", "output_tokens_details", "server_tool_use", "service_tier")
    return dict.fromkeys((*absent, "inference_geo")) | {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def test_a_message() -> None:
    c = InProcess()
    body = post_message(c).json()
    assert body.pop("id").startswith("msg_")
    (request,) = c.node.requests
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [text_block("hello world")],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": usage(len(request.prompt), cached=3, output=3),
    }


def test_the_events_of_a_stream() -> None:
    c = InProcess()
    response = post_message(c, stream=True)
    start, ping, block, *deltas, end_of_block, end, last = named_events(response.text)
    tokens = len(c.node.requests[0].prompt)
    assert start["message"].pop("id").startswith("msg_")
    assert start == {
        "type": "message_start",
        "message": {
            "type": "message",
            "role": "assistant",
            "model": "tiny",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": usage(tokens, cached=0, output=0),
        },
    }
    assert ping == {"type": "ping"}
    empty = {"type": "text", "text": ""}
    assert block == {"type": "content_block_start", "index": 0, "content_block": empty}
    assert {(event["type"], event["index"]) for event in deltas} == {("content_block_delta", 0)}
    assert "".join(event["delta"]["text"] for event in deltas) == "hello world"
    assert end_of_block == {"type": "content_block_stop", "index": 0}
    assert end == {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": usage(tokens, cached=3, output=3),
    }
    assert last == {"type": "message_stop"}


STOPS: list[tuple[dict[str, Any], str, str | None, str]] = [
    ({"max_tokens": 1}, "max_tokens", None, "hello"),
    ({"stop_sequences": [" wor"]}, "stop_sequence", " wor", "hello"),
    ({}, "end_turn", None, "hello world"),
]


def test_stop_reasons() -> None:
    c = InProcess()
    for fields, reason, sequence, text in STOPS:
        events = named_events(post_message(c, stream=True, **fields).text)
        content = "".join(event.get("delta", {}).get("text", "") for event in events)
        whole = post_message(c, **fields).json()
        assert content == whole["content"][0]["text"] == text
        for stop in (whole, events[-2]["delta"]):
            assert (stop["stop_reason"], stop["stop_sequence"]) == (reason, sequence)


def test_the_prompt_has_the_system_prompt_and_all_blocks() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("three", "dog")]},
    ]
    cached = {"type": "text", "text": "stop", "cache_control": {"type": "ephemeral"}}
    c = InProcess()
    for system in ("stop", [cached]):
        assert post_message(c, system=system, messages=turns).status_code == 200
    c.respond(
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "stop"},
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"role": "user", "content": "three\ndog"},
            ]
        },
    )
    first, second, chat = (list(request.prompt) for request in c.node.requests)
    assert first == second == chat


def test_sampling_parameters_reach_the_node() -> None:
    fields = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "max_tokens": 9}
    ignored = {"metadata": {"user_id": "u"}, "service_tier": "auto"}
    c = InProcess()
    assert post_message(c, **fields, **ignored).status_code == 200
    sampling = c.node.requests[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields


NO_EFFECT: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": {"type": "auto"}},
    {"thinking": {"type": "disabled"}},
    {"system": None, "stop_sequences": None, "stream": None, "metadata": None},
]


def test_fields_without_effect() -> None:
    c = InProcess()
    for fields in NO_EFFECT:
        assert post_message(c, **fields).status_code == 200


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": ...}, "Missing required parameter: 'max_tokens'."),
    ({"model": ...}, "Missing required parameter: 'model'."),
    ({"messages": ...}, "Missing required parameter: 'messages'."),
    ({"messages": []}, "'messages' must have at least one message."),
    (
        {"messages": [{"role": "system", "content": ""}]},
        "'messages' must have a message that is not empty.",
    ),
    ({"messages": ["hi"]}, "'messages.0': expected an object, but got a string"),
    ({"max_tokens": 0}, "'max_tokens': 0 is below the minimum of 1."),
    (
        {"max_tokens": CONTEXT},
        f"input length and `max_tokens` exceed context limit: 19 + {CONTEXT} > {CONTEXT}, decrease",
    ),
    (user("one " * 4 * CONTEXT), f"tokens > {CONTEXT} maximum"),
    ({"temperature": 1.5}, "'temperature': 1.5 is above the maximum of 1."),
    ({"top_k": "x"}, "'top_k': expected an integer, but got a string"),
    ({"stop_sequences": "x"}, "'stop_sequences': expected an array, but got a string"),
    ({"stop_sequences": [""]}, "'stop_sequences[0]'"),
    ({"tools": [{"name": "f"}]}, "Missing required parameter: 'tools.0.input_schema'."),
    ({"tools": [{"input_schema": {}}]}, "Missing required parameter: 'tools.0.name'."),
    ({"tools": [{"type": "web_search_20250305"}]}, "tools of the type 'web_search_20250305'"),
    ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "there are two tools named 'f'."),
    ({"tool_choice": {"type": "any"}}, "'tool_choice' needs 'tools'."),
    ({"tool_choice": {"type": "some"}}, "Invalid value for 'tool_choice.type'"),
    (
        {
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "tool", "name": "g"},
        },
        "names the tool 'g'",
    ),
    ({"thinking": {"type": "enabled"}}, "Missing required parameter: 'thinking.budget_tokens'."),
    ({"thinking": {"type": "maybe"}}, "Invalid value for 'thinking.type': Input should be"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "'thinking.budget_tokens': 0 is below"),
    ({"thinking": {"type": "enabled", "budget_tokens": 20}}, "'max_tokens' (20) must be greater"),
    ({"thinking": {"type": "disabled", "budget_tokens": 2}}, "has no place in thinking of type"),
    ({"output_config": {"effort": "little"}}, "Invalid value for 'output_config.effort'"),
    ({"output_config": {"task_budget": {}}}, "'output_config.task_budget' is not supported"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "edits.0.type': 'compact_"),
    ({"context_management": {"edits": [{}]}}, "parameter: 'context_management.edits.0.type'."),
    ({"chat_template_kwargs": {"messages": []}}, "must not set 'messages'"),
    ({"mcp_servers": [{}]}, "'mcp_servers' is not supported by this server"),
    (user([{"type": "image", "source": {}}]), "unsupported type 'image'"),
    (user([{"type": "document", "source": {}}]), "unsupported type 'document'"),
    (user([{"type": "thinking", "thinking": "x"}]), "'messages.0.content.0' has the unsupported"),
    (user([{"text": "x"}]), "'messages.0.content.0.type': expected a string, but got null"),
    (user([{"type": "text"}]), "Missing required parameter: 'messages.0.content.0.text'."),
    (user([{"type": "tool_result"}]), "parameter: 'messages.0.content.0.tool_use_id'."),
    (user([]), "'messages.0.content' must have at least one content block."),
    (user(5), "'messages.0.content': expected a string or an array of content blocks, but got an"),
    ({"system": 5}, "'system': expected a string or an array of content blocks"),
    ({"system": [{"type": "image"}]}, "'system.0' has the unsupported type 'image'"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "supported values are: user, assistant"),
    ({"messages": prefilled("x ")}, "cannot end with trailing whitespace"),
    ({"messages": prefilled("")}, "its text must not be empty"),
    (
        {"messages": prefilled("x"), "thinking": {"type": "enabled", "budget_tokens": 5}},
        "it must begin with a block of the type 'thinking'",
    ),
    ({"output_config": {"format": {"type": "xml"}}}, "Invalid 'output_config.format'"),
    ({"output_format": {"type": "json_schema"}}, "Invalid 'output_format'"),
    ({"output_config": {"format": JSON}, "output_format": JSON}, "set one of them"),
]


def test_invalid_requests() -> None:
    c = InProcess()
    for fields, message in WRONG:
        response = post_message(c, **fields)
        assert response.status_code == 400, fields
        error_body = response.json()
        assert [*error_body] == ["type", "error", "request_id"] and error_body["type"] == "error"
        assert [*error_body["error"]] == ["type", "message"]
        assert error_body["error"]["type"] == "invalid_request_error"
        assert message in error_body["error"]["message"]
    assert not c.node.requests


async def test_every_error_of_the_path_has_anthropics_shape(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0, api_key="secret", max_body_bytes=1000) as c:
        headers = {"x-api-key": "secret"}
        cases = [
            (await c.client.post("/v1/messages", json=HI), 401, "authentication_error"),
            (await c.client.get("/v1/messages", headers=headers), 405, "invalid_request_error"),
            (
                await c.client.post("/v1/messages", json=HI, headers=headers),
                503,
                "overloaded_error",
            ),
            (
                await c.client.post("/v1/messages", json=HI | {"x": "x" * 1000}, headers=headers),
                413,
                "request_too_large",
            ),
        ]
        for response, status, kind in cases:
            assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
            request_id = response.json()["request_id"]
            assert request_id == response.headers["request-id"] == response.headers["x-request-id"]
        await c.add()
        other = await c.client.post("/v1/messages", json=HI | {"model": "other"}, headers=headers)
        assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_stream_that_fails_ends_with_an_error_event(tmp_path: Path) -> None:
    async def fail(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        yield admitted()
        yield tokens_event(0, c.encode("hello"))
        raise RuntimeError("broken")

    async with cluster(tmp_path) as c:
        c.node.script = fail
        *_, last = named_events((await c.client.post("/v1/messages", json=body(stream=True))).text)
    assert last["type"] == "error" and last["error"]["type"] == "api_error"


def test_reasoning_is_omitted_by_default() -> None:
    c = InProcess(reply="<think>one two</think>three", reasoning_parser="qwen3")
    assert post_message(c).json()["content"] == [text_block("three")]
    events = named_events(post_message(c, stream=True).text)
    texts = [event["delta"].get("text", "") for event in events if "delta" in event]
    assert "".join(texts) == "three"


def test_output_formats_constrain_the_output() -> None:
    c = InProcess(reasoning_parser="qwen3")
    for fields in ({"output_config": {"format": JSON}}, {"output_format": JSON}):
        assert post_message(c, **fields).status_code == 200
        constraint = c.node.requests[-1].sampling.structured_outputs
        assert (
            json.loads(constraint.json) == JSON["schema"] and constraint.reasoning_end == "</think>"
        )
    assert post_message(c, output_format={"type": "text"}).status_code == 200
    assert not c.node.requests[-1].sampling.HasField("structured_outputs")


def test_a_prefilled_message_is_continued() -> None:
    c = InProcess(reasoning_parser="deepseek_r1")
    body = post_message(c, messages=prefilled("one two")).json()
    fields = {"model": "tiny", "messages": prefilled("one two")}
    count = c.post("/v1/messages/count_tokens", **fields)
    assert count.json()["input_tokens"] == len(c.node.requests[-1].prompt)
    assert c.prompt().endswith("<|start|>assistant\none two")
    assert body["content"] == [text_block("hello world")]


async def test_pings_while_a_long_prompt_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_alive, "PING_SECONDS", 0.01)
    pinged = asyncio.Event()

    async def long_prompt(request: pb.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        yield admitted()
        await pinged.wait()
        yield tokens_event(0, [65])
        yield pb.GenerateEvent(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH))

    async with cluster(tmp_path) as c:
        c.node.script = long_prompt
        kinds: list[str] = []
        async with c.client.stream("POST", "/v1/messages", json=HI | {"stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    kinds.append(line.removeprefix("event: "))
                if kinds.count("ping") > 2:
                    pinged.set()
    assert kinds[:4] == ["message_start", "ping", "ping", "ping"]
    assert kinds[-1] == "message_stop"


async def test_models_in_the_shape_of_the_client(tmp_path: Path) -> None:
    version = {"anthropic-version": "2023-06-01"}
    async with cluster(tmp_path) as c:
        page = (await c.client.get("/v1/models", headers=version)).json()
        model = (await c.client.get("/v1/models/tiny", headers=version)).json()
        behind = await c.client.get("/v1/models?after_id=tiny&limit=3", headers=version)
        missing = await c.client.get("/v1/models/other", headers=version)
        wrong = await c.client.get("/v1/models?limit=0", headers=version)
        openai = (await c.client.get("/v1/models")).json()
    assert page == {"data": [model], "has_more": False, "first_id": "tiny", "last_id": "tiny"}
    assert model["type"] == "model" and model["created_at"].endswith("Z")
    assert behind.json()["data"] == [] and behind.json()["first_id"] is None
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    assert wrong.status_code == 400 and wrong.json()["type"] == "error"
    assert openai["object"] == "list"
