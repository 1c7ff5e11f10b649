"""The JSON types that a schema allows, derived from all of its keywords."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

Types = frozenset[str]
NUMBERS: Types = frozenset(("integer", "number"))
SCALARS: Types = frozenset(("string", "boolean", "null")) | NUMBERS
# Nesting of schemas.
MAX_DEPTH = 64
_NESTED = {"properties": "object", "items": "array", "prefixItems": "array"}
_ANY_OF = ("anyOf", "oneOf")
_POINTER_ESCAPE = re.compile("~[01]")


class SchemaTypes:
    """The types of a schema and its parts. Each reference to a part of ``root`` is followed once,
    so cycles are allowed. Where numbers are allowed, so are integers."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._by_reference: dict[str, Types | None] = {}  # by references

    def of(self, schema: Any) -> Types | None:
        """The types that ``schema`` allows, or a superset; ``None`` if it does not say."""
        return self._of(schema, MAX_DEPTH) or None

    def of_property(self, name: str) -> Types | None:
        """The types of a property of the objects that the root describes."""
        return self._of_property(self._root, name, set(), MAX_DEPTH) or None

    def resolve(self, reference: Any) -> Any:
        """The part of the root that a reference points to; ``None`` for any other reference."""
        if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
            return None
        part: Any = self._root
        for step in unquote(reference).split("/")[1:]:
            step = _POINTER_ESCAPE.sub(lambda escape: "~/"[int(escape[0][1])], step)
            if isinstance(part, list) and step.isdecimal() and int(step) < len(part):
                part = part[int(step)]
            elif isinstance(part, Mapping) and step in part:
                part = part[step]
            else:
                return None
        return part

    def _of(self, schema: Any, depth: int) -> Types | None:
        """Like ``of``, but empty for a schema that only refers to itself."""
        if not isinstance(schema, Mapping) or not depth:
            return None
        constraints = [
            _by_name(schema.get("type")),
            _of_values(schema["enum"]) if isinstance(schema.get("enum"), list) else None,
            _of_values([schema["const"]]) if "const" in schema else None,
            *(self._of(part, depth - 1) for part in _parts(schema, "allOf")),
            *(self._of_any(_parts(schema, word), depth) for word in _ANY_OF),
            self._of_reference(schema.get("$ref"), depth),
        ]
        types = _intersection(constraints)
        if types is None:
            nested = frozenset(kind for word, kind in _NESTED.items() if word in schema)
            types = nested or None
        if types and schema.get("nullable") is True:
            types |= {"null"}
        return types

    def _of_any(self, schemas: list[Any], depth: int) -> Types | None:
        """The union of the types of ``schemas``; ``None`` if one of them does not say."""
        each = [self._of(part, depth - 1) for part in schemas]
        types = [part for part in each if part is not None]
        return frozenset().union(*types) if types and len(types) == len(each) else None

    def _of_reference(self, reference: Any, depth: int) -> Types | None:
        if not isinstance(reference, str):
            return None
        if reference not in self._by_reference:
            self._by_reference[reference] = frozenset()  # a cycle adds nothing
            self._by_reference[reference] = self._of(self.resolve(reference), depth - 1)
        return self._by_reference[reference]

    def _of_property(self, schema: Any, name: str, visited: set[str], depth: int) -> Types | None:
        if not isinstance(schema, Mapping) or not depth:
            return None
        constraints = [self._of_own_property(schema, name, depth)]
        constraints += [
            self._of_property(part, name, visited, depth - 1) for part in _parts(schema, "allOf")
        ]
        for word in _ANY_OF:
            each = [
                self._of_property(part, name, visited, depth - 1) for part in _parts(schema, word)
            ]
            types = [part for part in each if part is not None]
            constraints.append(frozenset().union(*types) if types else None)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in visited:
            visited.add(reference)
            target = self.resolve(reference)
            constraints.append(self._of_property(target, name, visited, depth - 1))
        return _intersection(constraints)

    def _of_own_property(self, schema: Mapping[str, Any], name: str, depth: int) -> Types | None:
        """The types by ``properties``, or else by the schemas for other properties. Patterns come
        from clients and are not evaluated: any of them may match."""
        properties, patterns = schema.get("properties"), schema.get("patternProperties")
        if isinstance(properties, Mapping) and name in properties:
            return self._of(properties[name], depth - 1)
        others = list(patterns.values()) if isinstance(patterns, Mapping) else []
        if isinstance(schema.get("additionalProperties"), Mapping):
            others.append(schema["additionalProperties"])
        return self._of_any(others, depth)


def fits(value: Any, types: Types) -> bool:
    """True if a value is of one of the types."""
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return type_of(value) in types or (type_of(value) == "integer" and "number" in types)


def type_of(value: Any) -> str:
    """The name of the JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _by_name(value: Any) -> Types | None:
    names = value if isinstance(value, list) else [value]
    types = frozenset(name for name in names if isinstance(name, str))
    return (types | NUMBERS if "number" in types else types) or None


def _of_values(values: Iterable[Any]) -> Types | None:
    types = frozenset(map(type_of, values))
    return types | NUMBERS if "number" in types else types


def _parts(schema: Mapping[str, Any], word: str) -> list[Any]:
    parts = schema.get(word)
    return parts if isinstance(parts, list) else []


def _intersection(constraints: Iterable[Types | None]) -> Types | None:
    """The intersection of the constraints that are not ``None`` or empty; ``None`` without any."""
    types: Types | None = None
    for each in constraints:
        if each is not None:
            types = types & each if types and each else types or each
    return types
