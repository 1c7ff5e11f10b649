"""Custom tools whose input follows a grammar."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tandem.tests.router.in_process import InProcess, tiny
from tandem.tests.router.in_process_responses import openai_client
from tandem.tests.router.openai.test_tools import TEMPLATE

LARK = 'start: "a" line*\nline: "\\n" /[a-z"]+/'
NOW: dict[str, Any] = {"type": "function", "name": "now", "description": "the time"}


def custom(name: str, syntax: str, definition: str) -> dict[str, Any]:
    layout = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": name, "format": layout}


PATCH, DAY = custom("patch", "lark", LARK), custom("day", "regex", r"\d{2}\.|tod\"ay")
NAMED = {"type": "custom", "name": "patch"}
TEXT = 'a\nb"c'
PATCHED = '{"name":"patch","parameters":{"input": """\n' + TEXT


def constraint(c: InProcess) -> Any:
    return c.node.requests[-1].sampling.structured_outputs


def test_the_text_of_a_context_free_grammar_ends_the_output() -> None:
    with openai_client(tiny(TEMPLATE), context=2048) as (c, client):
        for choice, tools in ((NAMED, [NOW, PATCH]), ("required", [PATCH])):
            c.node.reply = c.encode("[" + PATCHED)
            body: dict[str, Any] = {"input": "hi", "tools": tools, "tool_choice": choice}
            response = client.responses.create(**body)
            [call] = response.output
            assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", TEXT)
            place = f"tools[{len(tools) - 1}].format.definition"
            assert constraint(c).param == place
            assert json.dumps(LARK) in constraint(c).structural_tag
            events = list(client.responses.create(**body, stream=True))
            assert events[-1].response.output[0].input == TEXT
            done = [e for e in events if e.type == "response.custom_tool_call_input.done"]
            assert [event.input for event in done] == [TEXT]
        c.node.reply = c.encode("[" + PATCHED)[:-2]
        partial = client.responses.create(**body, max_output_tokens=len(c.node.reply))
        assert partial.status == "incomplete" and TEXT.startswith(partial.output[0].input)


def test_a_text_comes_after_the_other_calls() -> None:
    with openai_client(tiny(TEMPLATE), context=2048) as (c, client):
        body: dict[str, Any] = {"input": "hi", "tools": [NOW, PATCH, DAY]}
        body["tool_choice"] = "required"
        now, day = '{"name":"now","parameters":{}}', '{"name":"day","parameters":{"input":"05."}}'
        for output, names in (
            (f"[{now},{day},{PATCHED}", ["now", "day", "patch"]),
            (f"[{now}]", ["now"]),
            (f"[{PATCHED}", ["patch"]),
        ):
            c.node.reply = c.encode(output)
            response = client.responses.create(**body)
            assert [call.name for call in response.output] == names
            assert names[-1] != "patch" or response.output[-1].input == TEXT
            assert constraint(c).param == "tools"
        client.responses.create(**body, parallel_tool_calls=False)
        assert "tags_with_separator" not in constraint(c).structural_tag


def test_a_regular_expression_is_a_part_of_the_schema() -> None:
    with openai_client(tiny(TEMPLATE), context=2048) as (c, client):
        c.node.reply = c.encode('{"input":"tod\\"ay"}')
        for choice, output in (
            ({"type": "custom", "name": "day"}, '{"input":"tod\\"ay"}'),
            ("required", '[{"name":"day","parameters":{"input":"tod\\"ay"}}]'),
        ):
            c.node.reply = c.encode(output)
            body: dict[str, Any] = {"input": "hi", "tools": [DAY], "tool_choice": choice}
            response = client.responses.create(**body)
            assert response.output[0].input == 'tod"ay'
            assert constraint(c).param == "tools[0].format.definition" and constraint(c).compact
            match = re.search(r'"pattern": ("[^ ]+)[,}]', constraint(c).json)
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


def test_calls_that_the_model_may_make_follow_their_grammars() -> None:
    with openai_client(tiny(TEMPLATE), context=2048) as (c, client):
        now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        patch = '\n<tool_call>\n{"name": "patch", "arguments": {"input": """\n' + TEXT
        body: dict[str, Any] = {"input": "hi", "tools": [NOW, PATCH, DAY]}
        for output, names in ((f"one{now}{patch}", ["", "now", "patch"]), (now, ["now"])):
            c.node.reply = c.encode(output)
            response = client.responses.create(**body)
            assert [getattr(item, "name", "") for item in response.output] == names
            assert names[-1] != "patch" or response.output[-1].input == TEXT
        schema = json.loads(constraint(c).tool_calls)
        [calls] = schema["lists"]
        assert [
            schema["schemas"][call["schema"]].get("properties") is None for call in calls["calls"]
        ] == [
            True,
            False,
        ]
        assert calls["texts"][0]["lark"] == LARK and constraint(c).param == "tools"
        client.responses.create(**body | {"tools": [NOW, PATCH]})
        assert constraint(c).param == "tools[1].format.definition"
        client.responses.create(**body, text={"format": {"type": "json_object"}})
        assert constraint(c).json_object
        for fields in ({"tools": [NOW]}, {"tool_choice": "none"}):
            client.responses.create(**body | fields)
            assert not c.node.requests[-1].sampling.HasField("structured_outputs")


@pytest.mark.parametrize(
    ("parser", "before"),
    [
        ("llama3_json", '{"name": "patch", "parameters": {"input": """\n'),
        ("pythonic", '[now(), patch(input="""\n'),
        ("openai", ' to=functions.patch<|channel|>commentary json<|message|>{"input": """\n'),
    ],
)
def test_other_formats_have_texts_too(parser: str, before: str) -> None:
    body: dict[str, Any] = {"input": "hi", "tools": [NOW, PATCH, DAY]}
    with openai_client(tiny(TEMPLATE), context=2048, tool_call_parser=parser) as (c, client):
        c.node.reply = c.encode(before + TEXT)
        response = client.responses.create(**body)
        assert response.output[-1].name == "patch" and response.output[-1].input == TEXT
        assert json.dumps(LARK) in constraint(c).tool_calls


def test_calls_in_xml_follow_their_grammars_too() -> None:
    with openai_client(tiny(TEMPLATE), context=2048, tool_call_parser="qwen3_coder") as (c, client):
        now = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
        body: dict[str, Any] = {"input": "hi", "tools": [NOW, PATCH, DAY]}
        for name, text in (("patch", f"{TEXT}\n</parameter>"), ("day", "05.")):
            call = f"<tool_call>\n<function={name}>\n<parameter=input>\n{text}"
            c.node.reply = c.encode(f"one{now}{call}")
            response = client.responses.create(**body)
            assert [getattr(item, "name", "") for item in response.output] == ["", "now", name]
            assert response.output[-1].input == text
        for calls in json.loads(constraint(c).tool_calls)["lists"]:
            assert [call["until"] for call in calls["calls"]] == ["</function>"]
            assert [text.keys() - {"begin"} for text in calls["texts"]] == [{"lark"}, {"regex"}]


def test_wrong_grammars_are_named() -> None:
    with openai_client() as (c, _):
        for fields, name in WRONG:
            tool = PATCH | {"format": PATCH["format"] | fields}
            body = {"input": "hi", "tools": [{"type": "web_search"}, tool]}
            response = c.post("/v1/responses", **body)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == f"tools[1].format.{name}", response.text
        assert c.node.requests == []
