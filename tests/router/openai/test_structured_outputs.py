"""Constraints on the output: what nodes get of them, and what is wrong in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.tests.router.support import cluster

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_JSON = json.dumps(SCHEMA)
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}


def named(param: str, **fields: Any) -> pb.StructuredOutputs:
    return pb.StructuredOutputs(param=param, **fields)


TAKEN: list[tuple[dict[str, Any], pb.StructuredOutputs | None]] = [
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    (
        {"response_format": {"type": "json_object"}},
        named("response_format", json_object=True),
    ),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        named("response_format", json=AS_JSON),
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "one", "strict": True, "schema": SCHEMA},
            }
        },
        named("response_format", json=AS_JSON),
    ),
    (
        {"response_format": {"type": "structural_tag", **TAG}},
        named("response_format", structural_tag=json.dumps({"type": "structural_tag", **TAG})),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, named("structured_outputs.json", json=AS_JSON)),
    (
        {"structured_outputs": {"json": AS_JSON, "disable_any_whitespace": True}},
        named("structured_outputs.json", json=AS_JSON, compact=True),
    ),
    (
        {"structured_outputs": {"choice": ["yes", "no"]}},
        named("structured_outputs.choice", choice=pb.ChoiceList(texts=["yes", "no"])),
    ),
    (
        {"structured_outputs": {"json_object": True}},
        named("structured_outputs.json_object", json_object=True),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        named("response_format", json=AS_JSON),
    ),
    ({"guided_json": SCHEMA}, named("guided_json", json=AS_JSON)),
    ({"guided_regex": "a+"}, named("guided_regex", regex="a+")),
    ({"guided_choice": ["x"]}, named("guided_choice", choice=pb.ChoiceList(texts=["x"]))),
    ({"guided_grammar": 'root ::= "a"'}, named("guided_grammar", grammar='root ::= "a"')),
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


async def test_nodes_get_constraints(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=1) as c:
        for fields, expected in TAKEN:
            for send in (c.chat, c.complete):
                answer = await send(**fields)
                assert answer.status_code == 200, answer.text
                sampling = c.node.requests[-1].sampling
                assert sampling.HasField("structured_outputs") == (expected is not None)
                assert expected is None or sampling.structured_outputs == expected


async def test_wrong_constraints_name_their_field(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=1) as c:
        for fields, param, code in WRONG:
            for send in (c.chat, c.complete):
                answer = await send(**fields)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
        assert c.node.requests == []


@pytest.mark.parametrize(("parser", "start"), [("qwen3", "<think>"), ("deepseek_r1", "")])
async def test_constraints_hold_behind_the_reasoning(
    tmp_path: Path, parser: str, start: str
) -> None:
    async with cluster(tmp_path, nodes=1, reasoning_parser=parser) as c:
        assert (await c.chat(guided_regex="a")).status_code == 200
        wanted = c.node.requests[-1].sampling.structured_outputs
        assert (wanted.reasoning_start, wanted.reasoning_end) == (start, "</think>")


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
            answer = await c.complete(guided_regex="[", stream=stream)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "guided_regex"
