"""The types of arguments by their schemas, and the values that texts are by them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.shared.text.tool_parsers.schema_types import SchemaTypes
from tandem.shared.text.tool_parsers.tool_text import ToolText
from tandem.shared.text.tool_parsers.tool_use import ToolUse

STRING, NULL, OBJECT = {"type": "string"}, {"type": "null"}, {"type": "object"}
INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
OPTIONAL = {"anyOf": [STRING, NULL]}
DEFINITIONS = {
    "color": {"enum": ["red", "5"]},
    "a/b~": {"$ref": "#/$defs/color"},
    "tree": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/tree"}}, STRING]},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, INTEGER]},
    "own": {"$ref": "#/$defs/own"},
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, ""),
        (True, ""),
        ({"type": ["string", "null"]}, "null string"),
        (NUMBER, "integer number"),
        (
            {"enum": ["a", None, 1.5, True, [], {}]},
            "array boolean integer null number object string",
        ),
        ({"const": 5}, "integer"),
        (OPTIONAL, "null string"),
        ({"oneOf": [STRING, INTEGER]}, "integer string"),
        ({"anyOf": [STRING, {}]}, ""),
        ({"allOf": [{"type": ["string", "integer"]}, {"enum": [1, 2]}]}, "integer"),
        ({"allOf": [NUMBER, INTEGER]}, "integer"),
        ({"allOf": [{"description": "x"}, OBJECT]}, "object"),
        ({"allOf": [STRING, INTEGER]}, ""),
        ({"type": "string", "nullable": True}, "null string"),
        ({"properties": {}}, "object"),
        ({"items": STRING}, "array"),
        ({"properties": {}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "object"),
        ({"$ref": "#/$defs/color"}, "string"),
        ({"$ref": "#/definitions/a~1b~0"}, "string"),
        ({"$ref": "#/$defs/tree"}, "array string"),
        ({"$ref": "#/$defs/loop"}, "integer"),
        ({"$ref": "#/$defs/own"}, ""),
        ({"$ref": "#/$defs/missing"}, ""),
        ({"$ref": "https://example.org/x"}, ""),
        ({"type": 5, "enum": 5, "anyOf": 5, "allOf": {}, "$ref": 5}, ""),
    ],
)
def test_every_keyword_says_which_types_there_are(schema: Any, types: str) -> None:
    root = {"$defs": DEFINITIONS, "definitions": DEFINITIONS}
    assert " ".join(sorted(SchemaTypes(root).of(schema) or ())) == types


def test_schemas_that_refer_to_each_other_many_times_are_read_once() -> None:
    pair = [{"$ref": "#/$defs/{}"}] * 2
    names = [f"s{number}" for number in range(50)]
    definitions: dict[str, Any] = {
        name: {"anyOf": [{"$ref": f"#/$defs/{after}"} for _ in pair]}
        for name, after in zip(names, [*names[1:], "end"], strict=True)
    }
    definitions["end"] = STRING | {"properties": {"a": INTEGER}}
    types = SchemaTypes({"$defs": definitions, "$ref": "#/$defs/s0"})
    assert types.of({"$ref": "#/$defs/s30"}) == {"string"}
    assert types.of_property("a") in (None, {"integer"})
    deep: Any = STRING
    for _ in range(5000):
        deep = {"allOf": [deep]}
    assert SchemaTypes({}).of(deep) is None


SCHEMAS: tuple[tuple[dict[str, Any], str, Any], ...] = (
    *((OPTIONAL, text, text) for text in ("12345", "true", "[1, 2]", '"quoted"', "'q'", "None")),
    (OPTIONAL, "null", None),
    (STRING, "null", "null"),
    ({"$ref": "#/$defs/color"}, "5", "5"),
    ({"allOf": [{"$ref": "#/$defs/place"}]}, '{"city": "Paris"}', {"city": "Paris"}),
    ({"allOf": [{"$ref": "#/$defs/place"}]}, "{'city': None}", {"city": None}),
    ({"allOf": [{"$ref": "#/$defs/place"}]}, '"{\\"a\\": 1}"', {"a": 1}),
    (OBJECT, '{"City": True, "b": "NULL"}', {"City": True, "b": "NULL"}),
    ({"allOf": [INTEGER]}, "5", 5),
    ({"allOf": [INTEGER]}, '"5"', 5),
    ({"allOf": [INTEGER]}, "five", "five"),
    *(({"type": "boolean"}, text, True) for text in ("TRUE", "True", "true", '"true"')),
    ({"type": ["boolean", "null"]}, "FALSE", False),
    ({"type": ["boolean", "null"]}, "NULL", None),
    ({"oneOf": [STRING, INTEGER]}, "5", 5),
    ({"oneOf": [STRING, INTEGER]}, '"5"', "5"),
    ({"oneOf": [STRING, INTEGER]}, "true", "true"),
    ({"oneOf": [STRING, INTEGER]}, " a ", " a "),
    ({"type": ["string", "array"]}, "[1]", [1]),
    ({"type": ["string", "array"]}, "{}", "{}"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    (NUMBER, "1" * 5000, 10**5000 // 9),
    (NUMBER, "NaN", "NaN"),
)


@pytest.mark.parametrize("parser", ["glm45", "qwen3_xml"])
@pytest.mark.parametrize(
    "way", ["properties", "allOf", "additionalProperties", "patternProperties"]
)
def test_texts_are_values_of_their_types(parser: str, way: str) -> None:
    for schema, text, value in SCHEMAS:
        own = {"x": schema}
        ways: dict[str, Any] = {
            "properties": own,
            "allOf": [{"properties": own}],
            "additionalProperties": schema,
            "patternProperties": {"^x": schema},
        }
        definitions = {"color": {"enum": ["red", "5"]}, "place": OBJECT}
        root: dict[str, Any] = {way: ways[way], "$defs": definitions}
        body = f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
        if parser == "glm45":
            body = f"f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
        result = ToolText(ToolUse(parser=parser, schemas={"f": root}))
        deltas = [*result.push(f"<tool_call>{body}"), *result.flush()]
        raw = "".join(call.arguments for delta in deltas for call in delta.calls)
        if text.isdecimal() and len(text) > 99:
            assert raw == f'{{"x": {text}}}'
        else:
            assert json.loads(raw) == {"x": value}, (schema, text)
