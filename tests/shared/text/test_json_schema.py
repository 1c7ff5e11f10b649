"""Schemas without what has no effect: at the right places only, and with exact numbers."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest

from tandem.shared.text.json_schema import (
    FORMATS,
    MAX_BOUND,
    MAX_EXACT,
    MAX_INTEGER,
    SchemaError,
    clean_schema,
)

TEXT, OBJECT, ARRAY = ({"type": kind} for kind in ("string", "object", "array"))
ANNOTATIONS: dict[str, Any] = {
    "title": "t",
    "description": "d",
    "default": {"$ref": "nowhere"},
    "examples": [10**400],
    "example": 1,
    "deprecated": True,
    "readOnly": True,
    "writeOnly": False,
    "$comment": "c",
    "$vocabulary": {"https://x": True},
    "$recursiveAnchor": True,
    "contentEncoding": "base64",
    "contentMediaType": "application/json",
    "contentSchema": {"not": {}},
    "x-order": 1,
    "xml": {"name": "x"},
    "externalDocs": {"url": "x"},
    "discriminator": {"propertyName": "x"},
    "nullable": False,
    "propertyOrdering": ["a"],
    "enumNames": ["a"],
    "format": "binary",
}
# A schema, and what of it asks for something.
NO_EFFECT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (TEXT | ANNOTATIONS, TEXT),
    (TEXT | {"format": None}, TEXT),
    (OBJECT | {"propertyNames": {"type": "string", "title": "t"}}, OBJECT),
    (OBJECT | {"propertyNames": {"format": "ulid"}}, OBJECT),
    (OBJECT | {"propertyNames": True}, OBJECT),
    (OBJECT | {"unevaluatedProperties": {"title": "t"}}, OBJECT),
    (OBJECT | {"dependentRequired": {"a": []}}, OBJECT),
    (OBJECT | {"required": ["b"], "dependentRequired": {"a": ["b"]}}, OBJECT | {"required": ["b"]}),
    (OBJECT | {"dependencies": {}, "dependentSchemas": {"a": True}}, OBJECT),
    (OBJECT | {"uniqueItems": True, "contains": {"type": "null"}}, OBJECT),
    (ARRAY | {"propertyNames": {"pattern": "a"}, "dependentRequired": {"a": ["b"]}}, ARRAY),
    (ARRAY | {"uniqueItems": False, "minContains": 1, "maxContains": 2}, ARRAY),
    (ARRAY | {"uniqueItems": True, "maxItems": 1}, ARRAY | {"maxItems": 1}),
    (ARRAY | {"contains": TEXT, "minContains": 0}, ARRAY),
    (ARRAY | {"unevaluatedItems": True}, ARRAY),
    (TEXT | {"not": False}, TEXT),
    (TEXT | {"if": TEXT}, TEXT),
    (TEXT | {"then": TEXT, "else": False}, TEXT),
    (TEXT | {"if": False, "then": {"title": "t"}, "else": True}, TEXT),
    (TEXT | {"minLength": 2.0}, TEXT | {"minLength": 2}),
    (TEXT | {"maxLength": 10**30}, TEXT),
    (TEXT | {"$schema": "https://example.com/own", "$id": "#x"}, TEXT | {"$anchor": "x"}),
    (TEXT | {"$schema": 5}, TEXT),
    (TEXT | {"$dynamicAnchor": "x"}, TEXT | {"$anchor": "x"}),
]


@pytest.mark.parametrize(("schema", "expected"), NO_EFFECT)
def test_what_has_no_effect_is_left_out_wherever_there_is_a_schema(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    for outer in PLACES:
        before = copy.deepcopy(schema)
        assert clean_schema(outer(schema)) == outer(expected)
        assert schema == before


PLACES = (
    lambda schema: schema,
    lambda schema: {"properties": {"format": schema, "not": schema, "title": schema}},
    lambda schema: {"patternProperties": {"^a": schema}},
    lambda schema: {"additionalProperties": schema},
    lambda schema: {"items": schema},
    lambda schema: {"items": [schema, True]},
    lambda schema: {"prefixItems": [schema]},
    lambda schema: {"anyOf": [{"allOf": [{"oneOf": [schema]}]}]},
    lambda schema: {"$defs": {"default": schema}, "definitions": {"x": schema}},
    lambda schema: {"$ref": "#/components/schemas/x", "components": {"schemas": {"x": schema}}},
)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        False,
        {"enum": [{"format": "x", "title": "t", "uniqueItems": False}]},
        {"const": {"properties": {"a": {"format": "binary"}}}},
        {"properties": {"format": {"type": "string"}, "x-a": True, "$comment": {"type": "null"}}},
        {"required": ["format", "title"]},
        {"dependentRequired": {"a": ["format"]}},
        *({"type": "string", "format": form} for form in FORMATS),
        {"type": ["string", "array"], "uniqueItems": True},
        {"uniqueItems": True, "propertyNames": {"minLength": 2}, "contains": {}, "not": {}},
        {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"contains": True, "minContains": 0, "maxContains": 2},
        {"unevaluatedItems": False, "unevaluatedProperties": {"type": "null"}},
        {"$dynamicRef": "#a", "$recursiveRef": "#"},
        {"maxLength": None, "minLength": "x", "properties": 5, "items": None, "type": {}},
        {"$id": "https://example.com/x", "$anchor": "a", "$ref": "#a", "x-guidance": {"a": 1}},
        {"minimum": 0.5, "maximum": MAX_EXACT, "multipleOf": 0.01, "exclusiveMinimum": True},
    ],
)
def test_what_asks_for_something_stays(schema: Any) -> None:
    assert clean_schema(schema) == schema


DRAFTS = {
    "https://json-schema.org/draft-07/schema": "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-04/schema#": "http://json-schema.org/draft-04/schema",
    "http://json-schema.org/draft/2019-09/schema#": "https://json-schema.org/draft/2019-09/schema",
}


def test_drafts_have_the_address_that_is_known() -> None:
    for values, names in DRAFTS.items():
        assert clean_schema({"$schema": values}) == {"$schema": names}
    nested = {"items": {"$id": "#a"}}
    assert clean_schema(nested) == {"items": {"$anchor": "a"}}
    old = {"$schema": "http://json-schema.org/draft-07/schema"} | nested
    assert clean_schema(old) == old
    with pytest.raises(SchemaError, match=r"'\$schema' is 'http://json-schema.org/draft-03"):
        clean_schema({"$schema": "http://json-schema.org/draft-03/schema#"})


WRITTEN = (
    *(MAX_EXACT, -MAX_EXACT, MAX_EXACT + 2, 2**60, 10**18, MAX_INTEGER, -MAX_INTEGER),
    *(10**20, -(10**22), 10**300, 1e20, 0.1, 1e-300),
)
OTHERS = (
    *(MAX_EXACT + 1, -MAX_EXACT - 1, 1234567890123456789, 2**62 + 1, 10**20 + 1, 10**400),
    *(2**63 - 1, -(2**63) + 1, 2**63, -(2**63), 2**64, 1e23, 1e300),
)


def test_values_have_their_own_digits_or_are_refused_by_name() -> None:
    for number in WRITTEN:
        for schema in ({"const": number}, {"items": {"enum": [[{"a": number}]]}}):
            assert clean_schema(schema) == schema
    for number in OTHERS:
        for name, value in (("const", number), ("enum", ["x", [{"a": number}]])):
            with pytest.raises(SchemaError, match=f"'{name}' has the number .*beyond 2\\^53"):
                clean_schema({"anyOf": [{name: value}]})
    with pytest.raises(SchemaError, match="'multipleOf'"):
        clean_schema({"multipleOf": MAX_EXACT + 1})


INTEGER = {"type": ["integer", "null"]}
FAR = 2**63 - 1
BOUNDS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"minimum": MAX_EXACT + 2}, {"minimum": MAX_EXACT + 2}),
    ({"exclusiveMinimum": MAX_EXACT}, None),
    ({"exclusiveMinimum": MAX_EXACT + 1}, {"minimum": MAX_EXACT + 2}),
    ({"minimum": MAX_EXACT + 1}, None),
    ({"maximum": -MAX_EXACT - 1}, None),
    ({"minimum": FAR}, None),
    ({"maximum": 10**400}, {"maximum": MAX_INTEGER}),
    ({"minimum": -(10**400), "maximum": FAR}, {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}),
    ({"exclusiveMaximum": 2**62}, {"maximum": 2**62 - 1024}),
    ({"exclusiveMaximum": 2**62, "maximum": 5}, {"maximum": 5}),
    ({"exclusiveMaximum": 5, "maximum": 2**62}, {"maximum": 4}),
    ({"minimum": -1e19, "exclusiveMinimum": False}, {"minimum": -MAX_INTEGER}),
    ({"maximum": 2**62, "exclusiveMaximum": True}, {"maximum": 2**62 - 1024}),
]


@pytest.mark.parametrize(("bounds", "expected"), BOUNDS)
def test_large_bounds_are_exact_or_a_little_tighter(
    bounds: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    if expected is None:
        with pytest.raises(SchemaError, match="beyond 2"):
            clean_schema(INTEGER | bounds)
    else:
        assert clean_schema(INTEGER | bounds) == INTEGER | expected


def test_large_bounds_of_other_numbers_have_few_digits() -> None:
    assert clean_schema({"minimum": -FAR, "maximum": 1e300}) == {
        "minimum": -MAX_BOUND,
        "maximum": MAX_BOUND,
    }
    result = clean_schema({"type": "number", "maximum": 10**17 + 1})["maximum"]
    assert result == 10**17 and len(str(float(result))) < 12
    jsonschema.validate(result, {"maximum": 10**17 + 1})
