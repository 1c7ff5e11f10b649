"""Constraints on the output: what nodes get of them, and what is wrong in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.tests.router.in_process import HI, InProcess
from tandem.tests.router.in_process_responses import InProcessResponses
from tandem.tests.router.support import (
    admitted,
    cluster,
    events,
    finished,
    tokens_event,
    usage,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_JSON = json.dumps(SCHEMA)
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}


def constraint_of(param: str, **fields: Any) -> pb.StructuredOutputs:
    return pb.StructuredOutputs(param=param, **fields)


ACCEPTED: list[tuple[dict[str, Any], pb.StructuredOutputs | None]] = [
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    (
        {"response_format": {"type": "json_object"}},
        constraint_of("response_format", json_object=True),
    ),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        constraint_of("response_format", json=AS_JSON),
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "one", "strict": True, "schema": SCHEMA},
            }
        },
        constraint_of("response_format", json=AS_JSON),
    ),
    (
        {"response_format": {"type": "structural_tag", **TAG}},
        constraint_of(
            "response_format", structural_tag=json.dumps({"type": "structural_tag", **TAG})
        ),
    ),
    (
        {"structured_outputs": {"json": SCHEMA}},
        constraint_of("structured_outputs.json", json=AS_JSON),
    ),
    (
        {"structured_outputs": {"json": AS_JSON, "disable_any_whitespace": True}},
        constraint_of("structured_outputs.json", json=AS_JSON, compact=True),
    ),
    (
        {"structured_outputs": {"choice": ["yes", "no"]}},
        constraint_of("structured_outputs.choice", choice=pb.ChoiceList(texts=["yes", "no"])),
    ),
    (
        {"structured_outputs": {"json_object": True}},
        constraint_of("structured_outputs.json_object", json_object=True),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        constraint_of("response_format", json=AS_JSON),
    ),
    ({"guided_json": SCHEMA}, constraint_of("guided_json", json=AS_JSON)),
    ({"guided_regex": "a+"}, constraint_of("guided_regex", regex="a+")),
    ({"guided_choice": ["x"]}, constraint_of("guided_choice", choice=pb.ChoiceList(texts=["x"]))),
    ({"guided_grammar": 'root ::= "a"'}, constraint_of("guided_grammar", grammar='root ::= "a"')),
    ({"grammar": 'root ::= "a"'}, constraint_of("grammar", grammar='root ::= "a"')),
    ({"grammar": "", "json_schema": SCHEMA}, constraint_of("json_schema", json=AS_JSON)),
]

WRONG: list[tuple[dict[str, Any], str, str | None]] = [
    ({"response_format": "json"}, "response_format", "invalid_type"),
    (
        {"response_format": {"type": "json_object", "schema": 1}},
        "response_format.schema",
        "invalid_type",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
        "invalid_value",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}},
        "response_format.json_schema.schema",
        "invalid_type",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty_array"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "invalid_type"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "unsupported_parameter",
    ),
    ({"guided_regex": "a" * 200_000}, "guided_regex", "string_above_max_length"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
    (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "guided_regex",
        "invalid_value",
    ),
]


def test_nodes_get_constraints() -> None:
    c = InProcess()
    for fields, expected in ACCEPTED:
        for send in (c.chat, c.complete):
            response = send(**fields)
            assert response.status_code == 200, response.text
            sampling = c.node.requests[-1].sampling
            assert sampling.HasField("structured_outputs") == (expected is not None)
            assert expected is None or sampling.structured_outputs == expected


def test_wrong_constraints_name_their_field() -> None:
    c = InProcess()
    for fields, param, code in WRONG:
        for send in (c.chat, c.complete):
            response = send(**fields)
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert c.node.requests == []


@pytest.mark.parametrize(("parser", "start"), [("qwen3", "<think>"), ("deepseek_r1", "")])
def test_constraints_hold_behind_the_reasoning(parser: str, start: str) -> None:
    c = InProcess(reasoning_parser=parser)
    assert c.chat(guided_regex="a").status_code == 200
    constraint = c.node.requests[-1].sampling.structured_outputs
    assert (constraint.reasoning_start, constraint.reasoning_end) == (start, "</think>")


async def test_a_grammar_that_a_node_refuses_is_the_clients_error(tmp_path: Path) -> None:
    details = {
        "message": "Invalid 'guided_regex': unclosed.",
        "param": "guided_regex",
        "code": None,
    }

    async def refuse(request: pb.GenerateRequest, context: Any) -> Any:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, json.dumps(details))
        yield

    async with cluster(tmp_path) as c:
        c.node.script = refuse
        for stream in (False, True):
            response = await c.complete(guided_regex="[", stream=stream)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == "guided_regex"


CODE = "grammar_unfollowable"
REASON = "the output cannot follow its grammar: no token continues it"


async def cut_short(request: pb.GenerateRequest, context: Any) -> Any:
    """The first choice fails; the others go on meanwhile."""
    choices = range(request.sampling.n)
    yield admitted()
    yield usage(request)
    for index in choices:
        yield tokens_event(index, [40, 41])
    yield finished(0, pb.FINISH_REASON_ERROR, error=REASON, unfollowable=True)
    for index in choices[1:]:
        yield tokens_event(index, [42])
        yield finished(index)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_fails_in_the_only_choice_is_the_requests_error(
    tmp_path: Path, stream: bool
) -> None:
    message = f"Invalid 'guided_regex': {REASON}."
    error = {"message": message, "type": "invalid_request_error"}
    error |= {"param": "guided_regex", "code": "grammar_unfollowable"}
    async with cluster(tmp_path, nodes=2) as c:
        for node in c.nodes:
            node.script = cut_short
        for send in (c.chat, c.complete):
            response = await send(guided_regex="a", stream=stream)
            if stream:
                assert events(response.text)[-1] == {"error": error}
            else:
                assert (response.status_code, response.json()) == (400, {"error": error})
        assert sum(len(node.requests) for node in c.nodes) == 2, "tried once each"


def test_a_grammar_that_fails_in_one_of_several_choices_ends_that_one() -> None:
    c = InProcess()
    c.node.script = cut_short
    for send in (c.chat, c.complete):
        whole = send(guided_regex="a", n=3).json()["choices"]
        reasons = [choice["finish_reason"] for choice in whole]
        assert reasons == ["error", "stop", "stop"]
        assert [choice.get("error", {}).get("code") for choice in whole] == [CODE, None, None]
        streamed = events(send(guided_regex="a", n=3, stream=True).text)
        assert streamed.pop() == "[DONE]"
        ends = [e["choices"][0] for e in streamed if e["choices"][0]["finish_reason"]]
        assert [end.get("error", {}).get("code") for end in ends] == [CODE, None, None]
        # Of the best choices none may fail.
    assert c.complete(guided_regex="a", n=1, best_of=2).status_code == 400


SHAPES: tuple[tuple[str, dict[str, Any], dict[str, str] | None], ...] = (
    (
        "/v1/messages",
        {"model": "tiny", "max_tokens": 9, "messages": [HI]},
        {"type": "invalid_request_error"},
    ),
    ("/v1/responses", {"input": "hi"}, {"code": CODE}),
    ("/api/chat", {"model": "tiny", "stream": False, "messages": [HI]}, None),
)


def test_other_apis_have_the_error_in_their_shape() -> None:
    with InProcessResponses() as c:
        c.node.script = cut_short
        for path, body, expected in SHAPES:
            response = c.post(path, **body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert REASON[1:] in (error if expected is None else error["message"])
            assert expected is None or {name: error[name] for name in expected} == expected
