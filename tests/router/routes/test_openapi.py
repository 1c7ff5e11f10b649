"""/openapi.json documents requests and responses of every route."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator

from tandem.proto import tandem_pb2 as pb
from tandem.router import app
from tandem.router.anthropic.request import MessagesRequest
from tandem.router.openai.chat_request import ChatCompletionRequest
from tandem.router.openai.completion_request import CompletionRequest
from tandem.router.requests.body_model import BodyModel
from tandem.router.responses.request import CreateResponseRequest
from tandem.tests.router.in_process_responses import InProcessResponses
from tandem.tests.router.support import Cluster, admitted, cluster, tokens_event, usage

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}
MESSAGE: dict[str, Any] = {**CHAT, "model": "tiny", "max_tokens": 5}
EDITS = {
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
LOGPROBS = "message.output_text.logprobs"
ALL_TOKENS = {
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
    "return_token_ids": True,
    "return_prompt_text": True,
}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


async def document_of(c: Cluster) -> dict[str, Any]:
    document: dict[str, Any] = (await c.client.get("/openapi.json")).json()
    return document


@cache
def the_document() -> dict[str, Any]:
    """The document of all routers."""
    document: dict[str, Any] = app._routes(app.APIS).openapi()
    return json.loads(json.dumps(document))


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Raise ``ValidationError`` unless ``value`` is as ``schema`` of the document says."""
    Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def response_schema(
    document: dict[str, Any], path: str, method: str, kind: str = "application/json"
) -> dict[str, Any]:
    content = document["paths"][path][method]["responses"]["200"]["content"]
    schema: dict[str, Any] = content[kind]["schema"]
    return schema


async def test_the_document_is_valid_and_every_reference_leads_somewhere(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        document = await document_of(c)
    assert document == the_document()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    text = json.dumps(document)
    assert text.count('"$ref"') == sum(
        text.count(f'"#/components/schemas/{name}"') for name in schemas
    )


async def test_requests_at_the_same_time_get_the_same_document(tmp_path: Path) -> None:
    app._routes.cache_clear()  # it is made once
    async with cluster(tmp_path) as c:
        documents = await asyncio.gather(*(c.client.get("/openapi.json") for _ in range(8)))
    assert len({document.content for document in documents}) == 1


async def test_every_route_is_documented_and_every_documented_route_exists(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        documented = {(path, method) for path, method, _ in operations(await document_of(c))}
        routes = {
            (route.path_format, method.lower())
            for api in app.APIS
            for route in api.router.routes
            if isinstance(route, APIRoute)
            for method in route.methods or ()
        }
        assert routes - documented == {("/openapi.json", "get"), ("/web/{path}", "get")}
        assert documented <= routes
        for path, method in documented:
            response = await c.client.request(method, path.replace("{model}", "tiny"))
            assert response.status_code != 405 and "unknown_url" not in response.text, path


async def test_routes_that_need_a_key_say_so(tmp_path: Path) -> None:
    async with cluster(tmp_path, api_key="secret") as c:
        headers = {"authorization": "Bearer secret"}
        document = (await c.client.get("/openapi.json", headers=headers)).json()
        for path, method, operation in operations(document):
            response = await c.client.request(method, path.replace("{model}", "tiny"))
            assert ("security" in operation) == (response.status_code == 401), path
        assert (await c.client.get("/openapi.json")).status_code == 401


RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")
GETS = (
    *("/live", "/health", "/ready", "/health/live", "/health/ready", "/health/details", "/ping"),
    *("/version", "/load", "/v1/usage", "/v1/models", "/v1/models/tiny", "/tokenizer_info"),
)
POSTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, **ALL_TOKENS, "prompt_logprobs": 1, "stop": ["wor"]}),
    ("/v1/completions", TEXT),
    ("/v1/completions", {"prompt": ["a", "hi"], "logprobs": 2, "return_token_ids": True}),
    ("/v1/completions", {**TEXT, "echo": True, "logprobs": 1, "prompt_logprobs": 1, "n": 2}),
    ("/v1/messages", MESSAGE),
    ("/v1/messages", {**MESSAGE, "max_tokens": 1, "system": "one"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/responses", {"input": "hi", "tools": [FUNCTION], "include": [LOGPROBS]}),
    ("/v1/responses", {"input": "hi", "background": True, "tool_choice": "none"}),
    ("/v1/responses", {"input": "hi", "enable_response_messages": True}),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/embeddings", {"input": [[1, 2], [3]], "encoding_format": "base64"}),
    *((path, {"text_1": "a", "text_2": ["b", "c"]}) for path in ("/score", "/v1/score")),
    *((path, {"query": "a", "documents": ["b", {"text": "c"}]}) for path in RERANK),
    ("/rerank", {"query": "a", "documents": ["b"], "return_documents": False}),
    ("/invocations", CHAT),
    ("/invocations", TEXT),
    ("/v1/messages", {**MESSAGE, **EDITS}),
    ("/v1/messages/count_tokens", {**CHAT, "model": "tiny"}),
    ("/api/chat", {**CHAT, "model": "tiny", "stream": False}),
    ("/api/generate", {**TEXT, "model": "tiny", "stream": False}),
    ("/api/chat", {**CHAT, "model": "tiny", "stream": False, "logprobs": True, "top_logprobs": 1}),
    ("/api/embed", {"model": "tiny", "input": ["a", "b"]}),
    ("/api/embeddings", {"model": "tiny", "prompt": "a"}),
    ("/api/show", {"model": "tiny"}),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("/tokenize", CHAT),
    ("/tokenize", {"content": "hi"}),
    ("/tokenize", {"content": "hi 🤗", "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2]}),
)


@pytest.mark.parametrize("reasoning_parser", ["none", "qwen3"])
async def test_responses_match_their_schema(tmp_path: Path, reasoning_parser: str) -> None:
    options: dict[str, Any] = {
        "reasoning_parser": reasoning_parser,
        "enable_tokenizer_info_endpoint": True,
        "pooling": "last",
    }
    async with cluster(tmp_path, **options) as c:
        document = await document_of(c)
        for path in GETS:
            schema = response_schema(document, path.replace("tiny", "{model}"), "get")
            check(document, schema, (await c.client.get(path)).json())
        for path, body in POSTS:
            content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            check(document, content["schema"], body)
            response = await c.client.post(path, json=body)
            assert response.status_code == 200, response.text
            check(document, response_schema(document, path, "post"), response.json())


async def test_labels_match_their_schema(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        await c.add(scoring="labels", labels=("no", "yes"))
        document = await document_of(c)
        for path in ("/classify", "/v1/classify"):
            response = await c.client.post(path, json={"input": ["a", "hi"]})
            check(document, response_schema(document, path, "post"), response.json())


STREAMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {**CHAT, **USAGE, **ALL_TOKENS}),
    ("/v1/completions", {**TEXT, **USAGE, "logprobs": 1, "return_token_ids": True}),
    ("/v1/completions", {**TEXT, "stream": True, "echo": True, "logprobs": 0}),
    ("/v1/messages", {**MESSAGE, "stream": True, **EDITS}),
    ("/v1/responses", {"input": "hi", "stream": True, "tools": [FUNCTION]}),
)


def check_events(document: dict[str, Any], path: str, stream: str) -> int:
    """Check each event of a stream, and its data, which only in the last one need not be JSON.
    Returns their number."""
    schema = response_schema(document, path, "post", "text/event-stream")
    data = schema["properties"]["data"]
    *last, of_json = data.get("anyOf", (data,))
    events = [
        dict(line.split(": ", 1) for line in event.splitlines())
        for event in stream.removesuffix("\n\n").split("\n\n")
    ]
    for event in events:
        check(document, schema, event)
        if event is not events[-1] or {"const": event["data"]} not in last:
            assert of_json["contentMediaType"] == "application/json"
            check(document, of_json["contentSchema"], json.loads(event["data"]))
    return len(events)


def test_events_are_as_documented() -> None:
    with InProcessResponses(reasoning_parser="qwen3") as c:
        for path, body in STREAMS:
            assert check_events(the_document(), path, c.post(path, **body).text) > 3, path


async def test_the_errors_of_streams_are_as_documented(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:

        async def dying(request: pb.GenerateRequest, context: Any) -> AsyncIterator[Any]:
            yield admitted()
            yield usage(request)
            yield tokens_event(0, c.encode("hello"))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

        c.node.script = dying
        document = await document_of(c)
        for path, body in STREAMS:
            stream = await c.client.post(path, json=body)
            assert '"error"' in stream.text
            assert check_events(document, path, stream.text) > 1, path


async def test_errors_match_their_schema(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        document = await document_of(c)
        for path, _ in POSTS:
            response = await c.client.post(path, json={"model": 5})
            assert response.status_code == 400
            default = document["paths"][path]["post"]["responses"]["default"]
            check(document, default["content"]["application/json"]["schema"], response.json())


# -- fields of requests ---------------------------------------------------------------------------

BODIES: tuple[tuple[str, type[BodyModel], dict[str, Any]], ...] = (
    ("/v1/responses", CreateResponseRequest, {"input": "hi", "include": [LOGPROBS]}),
    ("/v1/chat/completions", ChatCompletionRequest, CHAT),
    ("/v1/completions", CompletionRequest, TEXT),
    ("/v1/messages", MessagesRequest, {**MESSAGE, "tool_choice": {"type": "auto"}}),
)
# Values that a field takes, where its schema's default is none, and what they need beside them.
EXAMPLES: dict[str, Any] = {
    "include_reasoning": True,
    "max_completion_tokens": 5,
    "best_of": 1,
    "stream_options": {},
    "reasoning_effort": "low",
    "system": "x",
    "suffix": "",
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {"type": "object"},
    "guided_choice": ["a"],
    "thinking_token_budget": -1,
    "output_format": {"type": "json_schema", "schema": {"type": "object"}},
}
BEYOND = {"minimum": "below the minimum", "maximum": "above the maximum"}


def example(schema: dict[str, Any], document: dict[str, Any]) -> Any:
    """A value that the schema of a field allows."""
    if "$ref" in schema:
        return example(document["components"]["schemas"][schema["$ref"].split("/")[-1]], document)
    if "anyOf" in schema:
        return example(schema["anyOf"][0], document)
    if "enum" in schema:
        return schema["enum"][0]
    of_type = {"boolean": True, "string": "x", "array": [], "object": {}}
    if schema.get("type") in ("integer", "number"):
        return max(1, schema.get("minimum", 0))
    return of_type.get(schema.get("type", ""))


@pytest.mark.parametrize(("path", "model", "valid"), BODIES)
def test_only_documented_fields_are_accepted(
    path: str, model: type[BodyModel], valid: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    allowed: dict[str, Any] = {"reasoning_parser": "qwen3", "trust_request_chat_template": True}
    document = the_document()
    fields = document["components"]["schemas"][model.__name__]["properties"]
    with InProcessResponses(**allowed) as c:
        for name, schema in fields.items():
            if name == "previous_response_id":
                continue  # there is none
            value = valid.get(name, EXAMPLES.get(name, example(schema, document)))
            if name == "model":
                value = "tiny"
            beside: dict[str, Any] = {"stream": True} if name == "stream_options" else {}
            if name in ("top_logprobs", "logprob_token_ids") and path != "/v1/responses":
                beside["logprobs"] = "chat" in path or 1
            response = c.post(path, **{**valid, **beside, name: value})
            assert response.status_code == 200, (name, value, response.text)
        assert not [r for r in caplog.records if "unknown and ignored" in r.getMessage()]
        c.post(path, **{**valid, "undocumented": 1})
        assert "the field 'undocumented', which is unknown" in caplog.text
        for name in model.unsupported.keys() - fields.keys():
            response = c.post(path, **{**valid, name: "other"})
            assert response.status_code == 400, name
            assert f"'{name}' is not supported" in response.json()["error"]["message"]
        assert not model.unsupported.keys() & fields.keys()


@pytest.mark.parametrize(("path", "model", "valid"), BODIES)
def test_documented_ranges_are_those_that_hold(
    path: str, model: type[BodyModel], valid: dict[str, Any]
) -> None:
    """A number beyond a documented limit is rejected, and one at the limit is not because of it."""
    fields = the_document()["components"]["schemas"][model.__name__]["properties"]
    limits = [
        (name, side, kind[side], step)
        for name, schema in fields.items()
        for kind in schema.get("anyOf", (schema,))
        for side, step in (("minimum", -1), ("maximum", 1))
        if side in kind
    ]
    assert len(limits) > 4
    # 'max_tokens' may be 0 with 'echo'.
    valid = {**valid, "echo": True} if path == "/v1/completions" else valid
    with InProcessResponses() as c:
        for name, side, limit, step in limits:
            beyond = c.post(path, **{**valid, name: limit + step})
            message = beyond.json()["error"]["message"]
            assert f"is {BEYOND[side]} of {limit}." in message, (name, message)
            within = c.post(path, **{**valid, name: limit})
            if within.status_code != 200:
                assert f"the {side}" not in within.json()["error"]["message"], name
