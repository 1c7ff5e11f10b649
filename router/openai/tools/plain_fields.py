"""Schemas of arguments that are written one by one, by name, instead of as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ....shared.text.tool_parsers.schema_types import SCALARS, SchemaTypes
from ....shared.text.tool_parsers.typed_value import TEXT, TEXT_OR_NULL, VARIANTS

# Keywords of definitions, which move into the schema of each argument.
_DEFINITIONS = ("$defs", "definitions")
_KNOWN = frozenset(("type", "properties", "required", "additionalProperties", *_DEFINITIONS))
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "$schema", "$id"))
_OF_TEXT = frozenset(("type", "enum", "const", "nullable", "$ref", "allOf", "anyOf", "oneOf"))
_ANY_NAME = re.compile(r"[^<>{}:=\s]+")
# Nested schemas of a text.
_MAX_DEPTH = 16


class NotPlainError(Exception):
    """The schema has a constraint that plain arguments cannot follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldForm:
    """The format of arguments: ``begin`` has a place for the name, and ``before``, the marker
    ``end`` and ``after`` follow the value. Texts are ``raw``, ended by ``breaks`` too, or between
    ``quote``, or JSON like other values. With ``scalars`` there are no nested values."""

    begin: str
    before: str = ""
    end: str = ""
    after: str = ""
    separator: str = ""
    raw: bool = False
    breaks: tuple[str, ...] = ()
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
        possible = {name: part for name, part in properties.items() if part is not False}
        for name in required:
            if not isinstance(name, str) or name not in possible:
                raise NotPlainError(f"the required argument {name!r:.64}, which is no property")
        types = SchemaTypes(schema)
        definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
        return [
            self._field(name, part if isinstance(part, dict) else {}, types, definitions)
            | {"required": name in required}
            for name, part in possible.items()
        ]

    def _field(
        self, name: str, schema: dict[str, Any], types: SchemaTypes, definitions: dict[str, Any]
    ) -> dict[str, Any]:
        if not self.names.fullmatch(name):
            raise NotPlainError(f"the name {name!r:.64}")
        begin = self.begin.format(name)
        kinds = types.of(schema)
        if self.raw:
            # The parser accepts any text as a value of these types.
            if not schema.keys() - _ANNOTATIONS - {"type"} and (not kinds or "string" in kinds):
                return self._text(begin)
            if not kinds and not schema.keys() & VARIANTS:
                raise NotPlainError(f"the untyped argument {name!r:.64}")
        if kinds and "string" in kinds and kinds <= (TEXT_OR_NULL if self.raw else TEXT):
            if self.raw or self.quote:
                return self._bounded_text(begin, _Texts.of(schema, types), "null" in kinds)
        elif self.scalars and (not kinds or kinds - SCALARS):
            raise NotPlainError(f"the nested argument {name!r:.64}")
        return self._ended(begin, self.end) | {"schema": {**definitions, **schema}}

    def _ended(self, begin: str, end: str) -> dict[str, Any]:
        return {"begin": begin, "before": self.before, "end": end, "after": self.after}

    def _text(self, begin: str) -> dict[str, Any]:
        """Any verbatim text."""
        field = self._ended(begin + self.quote, self.quote or self.end)
        return field | {"without": list(self.breaks)}

    def _bounded_text(self, begin: str, texts: _Texts, may_be_null: bool) -> dict[str, Any]:
        """A verbatim text; only a list of values can restrict it."""
        if texts.null != may_be_null:
            raise NotPlainError("a text that is null in a part of its schema")
        field = self._text(begin)
        if texts.values is None:
            return field
        values = [*texts.values, *(["null"] if texts.null else [])]
        if not values:
            raise NotPlainError("an empty 'enum'")
        for value in values:
            if any(marker in value for marker in (field["end"], *self.breaks)):
                raise NotPlainError(f"the value {value!r:.64}, in which there is a marker of calls")
        return field | {"choice": values}


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts that a schema allows (``None``: any), and whether it allows null."""

    values: tuple[str, ...] | None
    null: bool

    @classmethod
    def of(cls, schema: Any, types: SchemaTypes, depth: int = _MAX_DEPTH) -> _Texts:
        """Raise ``NotPlainError`` for a schema with further constraints on texts."""
        if not depth:
            raise NotPlainError("a text whose schema is nested too deeply")
        if not isinstance(schema, Mapping):
            return _Texts((), False) if schema is False else _ANY
        for keyword in schema.keys() - _OF_TEXT - _ANNOTATIONS:
            raise NotPlainError(f"{keyword!r:.64} of a text")
        texts = _ANY
        if "type" in schema:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            texts = _Texts(None if "string" in kinds else (), "null" in kinds)
        if "enum" in schema:
            texts = texts.both(_Texts.among(schema["enum"]))
        if "const" in schema:
            texts = texts.both(_Texts.among([schema["const"]]))
        if "$ref" in schema:
            target = types.resolve(schema["$ref"])
            if target is None:
                raise NotPlainError(f"the reference {schema['$ref']!r:.64}")
            texts = texts.both(_Texts.of(target, types, depth - 1))
        for part in _parts(schema, "allOf"):
            texts = texts.both(_Texts.of(part, types, depth - 1))
        for word in ("anyOf", "oneOf"):
            if word in schema:
                parts = [_Texts.of(part, types, depth - 1) for part in _parts(schema, word)]
                texts = texts.both(_Texts.any_of(parts, distinct=word == "oneOf"))
        return _Texts(texts.values, True) if schema.get("nullable") is True else texts

    @classmethod
    def among(cls, values: Any) -> _Texts:
        """The texts among the values of an enum."""
        if not isinstance(values, list):
            raise NotPlainError("an 'enum' that is no array")
        texts = dict.fromkeys(value for value in values if isinstance(value, str))
        return cls(tuple(texts), any(value is None for value in values))

    @classmethod
    def any_of(cls, parts: Iterable[_Texts], *, distinct: bool) -> _Texts:
        """The union of the parts. Raises ``NotPlainError`` if they must be ``distinct`` and
        overlap."""
        joined = cls((), False)
        for part in parts:
            both = joined.both(part)
            if distinct and (both.null or both.values != ()):
                raise NotPlainError("'oneOf' of a text that several of its schemas allow")
            values = None
            if joined.values is not None and part.values is not None:
                values = tuple(dict.fromkeys((*joined.values, *part.values)))
            joined = cls(values, joined.null or part.null)
        return joined

    def both(self, other: _Texts) -> _Texts:
        """The intersection."""
        if self.values is None or other.values is None:
            values = self.values if other.values is None else other.values
        else:
            values = tuple(value for value in self.values if value in other.values)
        return _Texts(values, self.null and other.null)


_ANY = _Texts(None, True)


def _parts(schema: Mapping[str, Any], word: str) -> list[Any]:
    parts = schema.get(word, [])
    if not isinstance(parts, list):
        raise NotPlainError(f"an {word!r} that is no array")
    return parts
