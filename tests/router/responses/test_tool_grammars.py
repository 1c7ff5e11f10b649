"""Custom tools whose input follows a grammar."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.openai.test_tools import TEMPLATE
from tandem.tests.router.responses.test_responses import served
from tandem.tests.router.support import Cluster, make_model, until

LARK = 'start: "a" line*\nline: "\\n" /[a-z"]+/'
NOW: dict[str, Any] = {"type": "function", "name": "now", "description": "the time"}


def custom(name: str, syntax: str, definition: str) -> dict[str, Any]:
    layout = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": name, "format": layout}


PATCH, DAY = custom("patch", "lark", LARK), custom("day", "regex", r"\d{2}\.|tod\"ay")
NAMED = {"type": "custom", "name": "patch"}
TEXT = 'a\nb"c'
PATCHED = '{"name":"patch","parameters":{"input": """\n' + TEXT


def demanded(c: Cluster) -> Any:
    return c.node.requests[-1].sampling.structured_outputs


async def test_the_text_of_a_context_free_grammar_ends_the_output(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TEMPLATE)
    async with served(tmp_path, context=2048) as (c, client):
        for choice, tools in ((NAMED, [NOW, PATCH]), ("required", [PATCH])):
            c.node.reply = c.encode("[" + PATCHED)
            params: dict[str, Any] = {"input": "hi", "tools": tools, "tool_choice": choice}
            response = await client.responses.create(**params)
            [call] = response.output
            assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", TEXT)
            place = f"tools[{len(tools) - 1}].format.definition"
            assert demanded(c).param == place
            assert json.dumps(LARK) in demanded(c).structural_tag
            events = [event async for event in await client.responses.create(**params, stream=True)]
            assert events[-1].response.output[0].input == TEXT
            done = [e for e in events if e.type == "response.custom_tool_call_input.done"]
            assert [event.input for event in done] == [TEXT]
        later = await client.responses.create(**params, background=True)
        await until(lambda: c.router.app.services.runs.find(later.id, "") is None)
        assert (await client.responses.retrieve(later.id)).output[0].input == TEXT
        c.node.reply = c.encode("[" + PATCHED)[:-2]
        cut = await client.responses.create(**params, max_output_tokens=len(c.node.reply))
        assert cut.status == "incomplete" and TEXT.startswith(cut.output[0].input)


async def test_a_text_comes_after_the_other_calls(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TEMPLATE)
    async with served(tmp_path, context=2048) as (c, client):
        params: dict[str, Any] = {"input": "hi", "tools": [NOW, PATCH, DAY]}
        params["tool_choice"] = "required"
        now, day = '{"name":"now","parameters":{}}', '{"name":"day","parameters":{"input":"05."}}'
        for output, names in (
            (f"[{now},{day},{PATCHED}", ["now", "day", "patch"]),
            (f"[{now}]", ["now"]),
            (f"[{PATCHED}", ["patch"]),
        ):
            c.node.reply = c.encode(output)
            response = await client.responses.create(**params)
            assert [call.name for call in response.output] == names
            assert names[-1] != "patch" or response.output[-1].input == TEXT
            assert demanded(c).param == "tools"
        await client.responses.create(**params, parallel_tool_calls=False)
        assert "tags_with_separator" not in demanded(c).structural_tag


async def test_a_regular_expression_is_a_part_of_the_schema(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TEMPLATE)
    async with served(tmp_path, context=2048) as (c, client):
        c.node.reply = c.encode('{"input":"tod\\"ay"}')
        for choice, output in (
            ({"type": "custom", "name": "day"}, '{"input":"tod\\"ay"}'),
            ("required", '[{"name":"day","parameters":{"input":"tod\\"ay"}}]'),
        ):
            c.node.reply = c.encode(output)
            params: dict[str, Any] = {"input": "hi", "tools": [DAY], "tool_choice": choice}
            response = await client.responses.create(**params)
            assert response.output[0].input == 'tod"ay'
            assert demanded(c).param == "tools[0].format.definition" and demanded(c).compact
            match = re.search(r'"pattern": ("[^ ]+)[,}]', demanded(c).json)
            assert (
                match
                and json.loads(match[1].rstrip("}")) == rf"^(?:{DAY['format']['definition']})$"
            )


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"syntax": None}, "syntax"),
    ({"syntax": "bnf"}, "syntax"),
    ({"definition": None}, "definition"),
    ({"definition": ""}, "definition"),
    ({"definition": 5}, "definition"),
    ({"definition": "x" * (128 * 1024 + 1)}, "definition"),
    ({"syntax": "regex", "definition": "x" * (16 * 1024 + 1)}, "definition"),
    ({"syntax": "regex", "definition": r"[)]\)(a))|(b"}, "definition"),
    ({"type": "json"}, "type"),
)


async def test_calls_that_the_model_may_make_follow_their_grammars(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TEMPLATE)
    async with served(tmp_path, context=2048) as (c, client):
        now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        patch = '\n<tool_call>\n{"name": "patch", "arguments": {"input": """\n' + TEXT
        params: dict[str, Any] = {"input": "hi", "tools": [NOW, PATCH, DAY]}
        for output, names in ((f"one{now}{patch}", ["", "now", "patch"]), (now, ["now"])):
            c.node.reply = c.encode(output)
            response = await client.responses.create(**params)
            assert [getattr(item, "name", "") for item in response.output] == names
            assert names[-1] != "patch" or response.output[-1].input == TEXT
        grammar = json.loads(demanded(c).tool_calls)
        [calls] = grammar["lists"]
        assert [
            grammar["schemas"][call["schema"]].get("properties") is None for call in calls["calls"]
        ] == [
            True,
            False,
        ]
        assert calls["texts"][0]["lark"] == LARK and demanded(c).param == "tools"
        await client.responses.create(**params | {"tools": [NOW, PATCH]})
        assert demanded(c).param == "tools[1].format.definition"
        await client.responses.create(**params, text={"format": {"type": "json_object"}})
        assert demanded(c).json_object
        for fields in ({"tools": [NOW]}, {"tool_choice": "none"}):
            await client.responses.create(**params | fields)
            assert not c.node.requests[-1].sampling.HasField("structured_outputs")


@pytest.mark.parametrize(
    ("parser", "before"),
    [
        ("llama3_json", '{"name": "patch", "parameters": {"input": """\n'),
        ("pythonic", '[now(), patch(input="""\n'),
        ("openai", ' to=functions.patch<|channel|>commentary json<|message|>{"input": """\n'),
    ],
)
async def test_other_formats_have_texts_too(tmp_path: Path, parser: str, before: str) -> None:
    make_model(tmp_path / "model", TEMPLATE)
    params: dict[str, Any] = {"input": "hi", "tools": [NOW, PATCH, DAY]}
    async with served(tmp_path, context=2048, tool_call_parser=parser) as (c, client):
        c.node.reply = c.encode(before + TEXT)
        response = await client.responses.create(**params)
        assert response.output[-1].name == "patch" and response.output[-1].input == TEXT
        assert json.dumps(LARK) in demanded(c).tool_calls


async def test_calls_in_xml_follow_their_grammars_too(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TEMPLATE)
    async with served(tmp_path, context=2048, tool_call_parser="qwen3_coder") as (c, client):
        now = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
        params: dict[str, Any] = {"input": "hi", "tools": [NOW, PATCH, DAY]}
        for name, text in (("patch", f"{TEXT}\n</parameter>"), ("day", "05.")):
            call = f"<tool_call>\n<function={name}>\n<parameter=input>\n{text}"
            c.node.reply = c.encode(f"one{now}{call}")
            response = await client.responses.create(**params)
            assert [getattr(item, "name", "") for item in response.output] == ["", "now", name]
            assert response.output[-1].input == text
        for calls in json.loads(demanded(c).tool_calls)["lists"]:
            assert [call["until"] for call in calls["calls"]] == ["</function>"]
            assert [text.keys() - {"begin"} for text in calls["texts"]] == [{"lark"}, {"regex"}]


async def test_wrong_grammars_are_named(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, _):
        for fields, name in WRONG:
            tool = PATCH | {"format": PATCH["format"] | fields}
            body = {"input": "hi", "tools": [{"type": "web_search"}, tool]}
            response = await c.client.post("/v1/responses", json=body)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == f"tools[1].format.{name}", response.text
        assert c.node.requests == []
