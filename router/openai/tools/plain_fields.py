"""Schemas of arguments that are written one by one, with their names, instead of as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What a strict schema may have beside its properties. What they refer to moves into each.
_DEFINITIONS = ("$defs", "definitions")
_KNOWN = frozenset(("type", "properties", "required", "additionalProperties", *_DEFINITIONS))
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "$schema", "$id"))
_OF_TEXT = frozenset(("type", "enum", "const"))
_SCALARS = frozenset(("integer", "number", "boolean", "null"))
_ANY_NAME = re.compile(r"[^<>{}:=\s]+")


class NotPlainError(Exception):
    """The schema asks for more than such arguments can be made to follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldForm:
    """How arguments are written: ``begin`` has a place for the name, and the value is followed by
    ``before``, the marker ``end``, and ``after``. Texts are ``raw``, or between ``quote``, or JSON
    as other values are. ``scalars`` says that there are no nested values."""

    begin: str
    before: str = ""
    end: str = ""
    after: str = ""
    separator: str = ""
    raw: bool = False
    quote: str = ""
    scalars: bool = False
    names: re.Pattern[str] = _ANY_NAME

    def fields(self, schema: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The arguments that follow a schema, in its order. Raises ``NotPlainError``."""
        for keyword in schema.keys() - _KNOWN - _ANNOTATIONS:
            raise NotPlainError(f"{keyword!r:.64}")
        required = schema.get("required", ())
        properties = schema.get("properties", {})
        if not isinstance(properties, dict) or not isinstance(required, (list, tuple)):
            raise NotPlainError("properties that are not an object")
        definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
        return [
            self._field(name, value, definitions) | {"required": name in required}
            for name, value in properties.items()
        ]

    def _field(self, name: str, schema: Any, definitions: dict[str, Any]) -> dict[str, Any]:
        if not self.names.fullmatch(name):
            raise NotPlainError(f"the name {name!r:.64}")
        if not isinstance(schema, dict):
            schema = {}
        begin = self.begin.format(name)
        if self.raw or self.quote:
            types = _types(schema)
            if "string" in types:
                return self._text(begin, schema, types)
            if self.raw and not types and not schema.keys() & {"anyOf", "oneOf", "$ref"}:
                raise NotPlainError(f"the untyped argument {name!r:.64}")
            if self.scalars and (not types or types - _SCALARS):
                raise NotPlainError(f"the nested argument {name!r:.64}")
        return self._ended(begin, self.end) | {"schema": {**definitions, **schema}}

    def _ended(self, begin: str, end: str) -> dict[str, Any]:
        return {"begin": begin, "before": self.before, "end": end, "after": self.after}

    def _text(self, begin: str, schema: dict[str, Any], types: set[str]) -> dict[str, Any]:
        """A text as it is, which only a list of values can bound."""
        for keyword in schema.keys() - _OF_TEXT - _ANNOTATIONS:
            raise NotPlainError(f"{keyword!r:.64} of a text")
        written = self._ended(begin + self.quote, self.quote or self.end)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is None:
            if self.quote and types != {"string"}:
                raise NotPlainError("a text that may be another value")
            return written
        if not isinstance(values, list) or not values:
            raise NotPlainError("an empty 'enum'")
        if not all(isinstance(value, str) for value in values):
            raise NotPlainError("an 'enum' of texts and other values")
        return written | {"choice": values}


def _types(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    return {name for name in names if isinstance(name, str)}
