"""Arguments that are written as plain text, turned into JSON by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any

from .python_literal import literal_to_json
from .reader import Reader
from .tool_use import ToolUse


class PlainArguments:
    """Reads the arguments of one call, and reports them as one JSON object, key by key. The text of
    strings is reported as it arrives; ``untyped_text`` says that arguments without a type are
    strings."""

    def __init__(self, reader: Reader, tools: ToolUse, name: str, *, untyped_text: bool) -> None:
        self._reader = reader
        properties = tools.schemas.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._untyped_text = untyped_text
        self._separator = "{"

    def value(self, key: str, *ends: str) -> Generator[None, None, bool]:
        """Read the value of ``key``, up to one of ``ends``, and that. Returns whether it has
        ended."""
        types = self._types(key)
        reader = self._reader
        head = f"{self._separator}{json.dumps(key, ensure_ascii=False)}: "
        self._separator = ", "
        if types != {"string"}:
            text = yield from reader.capture(*ends)
            reader.arguments(head + _converted(text, types))
            return True
        reader.arguments(head + '"')
        ended = yield from reader.until(*ends, to=lambda text: reader.arguments(escaped(text)))
        reader.arguments('"' if ended else "")
        return bool(ended)

    def close(self) -> None:
        """End the object."""
        self._reader.arguments("{}" if self._separator == "{" else "}")

    def _types(self, key: str) -> set[str]:
        """The JSON types that the schema allows; empty if it does not say."""
        schema = self._properties.get(key)
        given = schema.get("type") if isinstance(schema, Mapping) else None
        names = given if isinstance(given, list) else [given]
        types = {name for name in names if isinstance(name, str)}
        return types or ({"string"} if self._untyped_text and not _has_variants(schema) else set())


def escaped(text: str) -> str:
    """Text inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _has_variants(schema: Any) -> bool:
    return isinstance(schema, Mapping) and any(
        name in schema for name in ("anyOf", "oneOf", "$ref")
    )


def _converted(text: str, types: set[str]) -> str:
    """The JSON of an argument. One that is not as its schema says is a string."""
    plain = text.strip()
    if "string" in types and plain != "null":
        return json.dumps(text, ensure_ascii=False)
    try:
        json.loads(plain, parse_constant=_reject)
        return plain
    except (ValueError, RecursionError):
        pass
    try:
        return literal_to_json(plain)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not in JSON")
