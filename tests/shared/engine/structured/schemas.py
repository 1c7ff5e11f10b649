"""Random JSON schemas, whose values are short."""

from __future__ import annotations

import random
from typing import Any

SIMPLE: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 8},
    {"type": "integer", "minimum": -50, "maximum": 999},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", "green", 3, None]},
    {"const": {"a": [1, "x"]}},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": ["integer", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "items": False},
    {"type": "object", "patternProperties": {"^[a-d]$": {"type": "boolean"}},
     "additionalProperties": False, "maxProperties": 2},
    {"$ref": "#/$defs/leaf"},
)  # fmt: skip
# What references lead to.
LEAF: dict[str, Any] = {"enum": ["leaf", 0, False, [], {}]}


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [_schema(rng, 2) | {"$defs": {"leaf": LEAF}} for _ in range(count)]


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(("object", "array", "anyOf", "simple")) if depth else "simple"
    if kind == "object":
        names = rng.sample(["name", "age", "Größe", 'q"uote', "a b"], rng.randint(1, 3))
        properties = {name: _schema(rng, depth - 1) for name in names}
        required = [name for name in names if rng.random() < 0.6]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    if kind == "array":
        return {"type": "array", "items": _schema(rng, depth - 1), "maxItems": rng.randint(1, 3)}
    if kind == "anyOf":
        return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    return rng.choice(SIMPLE)
