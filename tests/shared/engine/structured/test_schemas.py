"""Values that follow a schema, drawn at random from its grammar, are valid; what is not implemented
is refused by name."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from tandem.router.errors import RequestError
from tandem.router.openai.tools.forced_calls import named_call, required_calls
from tandem.router.openai.tools.guided_calls import GuidedTools
from tandem.shared.engine.structured.grammar import GrammarError
from tandem.shared.engine.structured.llguidance_backend import LLGuidanceBackend
from tandem.shared.engine.structured.params import StructuredOutputs
from tandem.shared.text.json_schema import FORMATS
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.router.support import make_model

BIG, FAR = 2**53, 2**63
SAMPLES, MAX_TOKENS = 12, 400


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> LLGuidanceBackend:
    folder = make_model(tmp_path_factory.mktemp("schemas"))
    return LLGuidanceBackend(read_tokenizer_files(folder), 320, [0])


def sample_text(backend: LLGuidanceBackend, constraint: StructuredOutputs, seed: int) -> str | None:
    """A random output, unless it gets too long."""
    rng, matcher = random.Random(seed), backend.compile(constraint.key()).matcher()
    text = b""
    for _ in range(MAX_TOKENS):
        mask = matcher.mask()
        allowed = [t for t in range(8 * len(mask)) if mask[t >> 3] & (1 << (t & 7))]
        if matcher.accepting and (not allowed or rng.random() < 0.3):
            return text.decode()
        # Those that end something come more often, so that it ends.
        ends = [t for t in allowed if backend.text_of(t) in (b'"', b"}", b"]", b",", b":")]
        token = rng.choice(ends if ends and rng.random() < 0.4 else allowed)
        matcher.advance([token])
        text += backend.text_of(token)
    return None


def allows(backend: LLGuidanceBackend, schema: Any, text: str) -> bool:
    constraint = StructuredOutputs(json=schema, whitespace=False)
    matcher = backend.compile(constraint.key()).matcher()
    try:
        matcher.advance(backend.encode(text))
    except GrammarError:
        return False
    return matcher.accepting


EMPTY: dict[str, Any] = {"type": "object", "additionalProperties": False}
SHORT = {"type": "string", "maxLength": 3}


def record(**properties: Any) -> dict[str, Any]:
    return EMPTY | {"properties": properties, "required": [*properties]}


FOLLOWED: dict[str, Any] = {
    "annotations": SHORT
    | {"format": "binary", "title": "t", "default": 1, "x-a": {"not": {}}, "nullable": False},
    "record of Zod 4": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "number"},
        "maxProperties": 2,
    },
    "names of properties": record(
        format={"type": "null"}, enum=SHORT, **{"$ref": {"type": "boolean"}, "not": {"const": 1}}
    ),
    "data that looks like a schema": {
        "enum": [{"format": "x", "$ref": "#/no"}, [{"uniqueItems": False, "title": 5}]]
    },
    "dialects": record(
        a={"$schema": "https://example.com/dialect", "type": "null"},
        b={"$id": "#b", "type": "boolean"},
        c={"$ref": "#b"},
    ),
    "OpenAPI": {
        "$ref": "#/components/schemas/pet",
        "components": {"schemas": {"pet": record(kind={"const": "cat", "example": "dog"})}},
        "discriminator": {"propertyName": "kind"},
    },
    "recursion": {
        "$dynamicAnchor": "tree",
        **EMPTY,
        "properties": {"kids": {"type": "array", "items": {"$ref": "#tree"}, "maxItems": 2}},
        "maxProperties": 1,
        "required": ["kids"],
    },
    "tuples": {
        "$schema": "https://json-schema.org/draft-07/schema",
        "type": "array",
        "items": [{"type": "boolean"}, {"type": "null"}],
        "additionalItems": False,
    },
    "arrays": {
        "type": "array",
        "items": {"type": "boolean"},
        "uniqueItems": False,
        "maxItems": 3.0,
    },
    "constants": {"enum": [BIG, -BIG, BIG + 2, 2**60, [{"a": -(2**62)}], 10**20]},
    "integers": {"type": "integer", "minimum": BIG + 2, "maximum": BIG + 6},
    "integers of 64 bits": {"type": "integer", "minimum": -FAR, "maximum": FAR - 1},
    "unsigned integers": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2 * FAR},
    "tight integers": {"type": "integer", "minimum": 2**60, "exclusiveMaximum": 2**60 + 2048},
    "negative integers": {"type": "integer", "minimum": -(10**30), "maximum": -(10**18)},
    "numbers": {"type": "number", "minimum": -FAR, "maximum": 1e300},
    "any numbers": {"type": ["number", "null"], "minimum": 10**17, "maximum": 10**17 + 1},
    "draft 4": {"type": "integer", "minimum": 5, "maximum": 2**60, "exclusiveMaximum": True},
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_drawn_values_are_valid(backend: LLGuidanceBackend, name: str) -> None:
    schema = FOLLOWED[name]
    texts = _checked(backend, StructuredOutputs(json=schema, whitespace=False), schema)
    assert texts


def _checked(backend: LLGuidanceBackend, constraint: StructuredOutputs, schema: Any) -> set[str]:
    texts = {sample_text(backend, constraint, seed) for seed in range(SAMPLES)} - {None}
    draft = jsonschema.Draft202012Validator
    validator = jsonschema.validators.validator_for(_standard(schema), default=draft)
    for text in texts:
        assert text is not None
        validator(_standard(schema)).validate(json.loads(text))
    return {text for text in texts if text is not None}


def _standard(schema: Any) -> Any:
    """The schema as the validator knows it."""
    text = json.dumps(schema)
    for ours, standard in (
        ('"$id": "#b"', '"$anchor": "b"'),
        ("https://json-schema.org/draft-07/schema", "http://json-schema.org/draft-07/schema#"),
        ('"$schema": "https://example.com/dialect", ', ""),
        ('"exclusiveMaximum": true', '"exclusiveMaximum": 1152921504606846976'),
    ):
        text = text.replace(ours, standard)
    return json.loads(text)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"const": BIG + 2}, [BIG + 2], [BIG, BIG + 1, BIG + 3]),
        ({"type": "integer", "minimum": BIG}, [BIG, BIG + 1], [BIG - 1]),
        ({"type": "integer", "exclusiveMaximum": BIG + 3}, [BIG + 1, BIG + 2], [BIG + 3, BIG + 4]),
        ({"type": "integer", "minimum": 0, "maximum": FAR - 1}, [0, 2**62 + 1], [-1, FAR, 2 * FAR]),
        ({"type": "number", "maximum": FAR}, [5, 10**18], [FAR + 1]),
        ({"enum": [{"n": 10**20}]}, [], [5]),
    ],
)
def test_numbers_are_followed_to_the_digit(
    backend: LLGuidanceBackend, schema: Any, inside: list[int], outside: list[int]
) -> None:
    assert all(allows(backend, schema, str(number)) for number in inside)
    assert not any(allows(backend, schema, str(number)) for number in outside)


REFUSED: list[tuple[Any, str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "null"}}, "contains"),
    ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "dependencies": {"a": {"minProperties": 2}}}, "dependencies"),
    ({"type": "object", "dependentSchemas": {"a": {"minProperties": 2}}}, "dependentSchemas"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"not": {"type": "null"}}, "not"),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
    ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ({"type": "string", "maxLength": None}, "maxLength"),
    ({"enum": [1234567890123456789]}, "'enum' has the number 1234567890123456789"),
    ({"const": [{"a": BIG + 1}]}, "'const' has the number 9007199254740993"),
    ({"const": -FAR}, "'const' has the number -9223372036854775808"),
    ({"type": "integer", "minimum": BIG + 1}, "'minimum' has the number 9007199254740993"),
    ({"type": "integer", "exclusiveMaximum": -(10**30)}, "'exclusiveMaximum' has the number -1000"),
    ({"multipleOf": 10**18}, "'multipleOf' has the number"),
]


@pytest.mark.parametrize(("schema", "name"), REFUSED)
@pytest.mark.parametrize("nested", [False, True])
def test_what_cannot_be_followed_is_refused_by_name(
    backend: LLGuidanceBackend, schema: Any, name: str, nested: bool
) -> None:
    whole = record(a={"type": "array", "items": schema}) if nested else schema
    with pytest.raises(GrammarError, match=re.escape(name)):
        backend.compile(StructuredOutputs(json=whole).key())


def test_schemas_in_grammars_and_tags_are_followed_too(backend: LLGuidanceBackend) -> None:
    number, text = {"const": BIG + 1}, {"type": "boolean", "format": "x", "propertyNames": {}}
    tag = {"type": "tag", "begin": "<", "end": ">"}
    for schema in (number, text):
        content = {"type": "json_schema", "json_schema": schema}
        constraints = (
            StructuredOutputs(grammar=f'start: "<" %json {json.dumps(schema)} ">"'),
            StructuredOutputs(structural_tag={"format": tag | {"content": content}}),
        )
        for constraint in constraints:
            if schema is text:
                result = sample_text(backend, constraint, 1)
                assert result is not None and result.strip("<> \n\r\t") in ("true", "false")
            else:
                with pytest.raises(GrammarError, match="'const' has the number 9007199254740993"):
                    backend.compile(constraint.key())
    plain = StructuredOutputs(grammar='start: "%json {}" %json {"const": 5}')
    assert sample_text(backend, plain, 1) == "%json {}5"


TOOLS: dict[str, Any] = {
    "tree": EMPTY
    | {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/tree",
        "properties": {
            "value": {"$ref": "#/$defs/Value"},
            "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
        },
        "required": ["value"],
        "$defs": {"Value": {"type": "boolean", "format": "binary"}},
    },
    "leaf": record(value={"$ref": "#/$defs/Value"}) | {"$defs": {"Value": {"enum": ["a", "b"]}}},
}


@pytest.mark.parametrize("parallel", [False, True])
def test_forced_calls_follow_the_schema_of_their_tool(
    backend: LLGuidanceBackend, parallel: bool
) -> None:
    forced = required_calls(TOOLS, parallel=parallel)
    constraint = StructuredOutputs(json=forced.json, whitespace=False)
    called = set()
    for seed in range(3 * SAMPLES):
        for call in json.loads(sample_text(backend, constraint, seed) or "[]"):
            called.add(call["name"])
            jsonschema.validate(call["parameters"], TOOLS[call["name"]])
    assert called == {"tree", "leaf"}
    named_constraint = StructuredOutputs(json=named_call(TOOLS["tree"]).json, whitespace=False)
    assert _checked(backend, named_constraint, TOOLS["tree"])


@pytest.mark.parametrize("parser", ["hermes", "qwen3_xml", "glm45", "pythonic"])
def test_strict_tools_may_have_keywords_without_effect(parser: str) -> None:
    text = {"type": "string", "format": "ulid", "deprecated": True, "$comment": "c", "x-a": 1}
    schema = record(a=text, b={"type": "integer", "format": "int32"}) | {"x-b": 1, "$id": "i"}
    schema["propertyNames"] = {"type": "string"}
    tools = GuidedTools(
        parser=parser, schemas={"f": schema}, grammars={}, strict={"f": "tools[0].parameters"}
    )
    assert tools.constraint() is not None
    big = GuidedTools(
        parser="qwen3_xml",
        schemas={"f": record(a={"const": BIG + 1})},
        grammars={},
        strict={"f": "tools[0].parameters"},
    )
    with pytest.raises(RequestError, match=r"'tools\[0\].parameters': 'const' has the number"):
        big.constraint()


def test_only_formats_that_are_followed_reach_the_compiler(backend: LLGuidanceBackend) -> None:
    for form in FORMATS:
        constraint = StructuredOutputs(json={"type": "string", "format": form}, whitespace=False)
        backend.compile(constraint.key())
        assert not allows(backend, {"type": "string", "format": form}, '"? ?"'), form
    assert allows(backend, {"type": "string", "format": "unheard-of"}, '"? ?"')
