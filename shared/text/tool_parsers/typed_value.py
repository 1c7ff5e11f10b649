"""Arguments written as plain text, converted to JSON by the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..markers import first_of, partial_marker
from .json_text import escape, json_string
from .python_literal import literal_to_json
from .reader import MAX_SPACE, Reader, Sink
from .schema_types import SchemaTypes, Types, fits
from .tool_use import ToolUse

TEXT: Types = frozenset(("string",))
TEXT_OR_NULL: Types = frozenset(("string", "null"))
# Keywords of an argument without a type that may have several.
VARIANTS = frozenset(("anyOf", "oneOf", "allOf", "$ref"))
# In any case, as models write them.
_CONSTANTS = ("true", "false", "null")
_STRING_MARK = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEnd:
    """How a value ends: at ``marker`` if one of ``followers`` is next, since the marker may also be
    part of the value; or, since models forget the marker, before one of ``breaks``, some of which
    need a follower too. With ``on_line``, a line break before the marker belongs to it."""

    marker: str
    followers: tuple[str, ...]
    breaks: Mapping[str, tuple[str, ...]]
    on_line: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        markers = (f"\n{self.marker}", self.marker) if self.on_line else (self.marker,)
        return *markers, *self.breaks


class PlainArguments:
    """Reads the arguments of one call, and reports them as one JSON object, key by key. Strings are
    streamed. With ``untyped_text``, arguments without a type are strings."""

    def __init__(
        self, reader: Reader, tools: ToolUse, name: str, end: ValueEnd, *, untyped_text: bool
    ) -> None:
        self._reader = reader
        self._schema = tools.schemas.get(name, {})
        self._types = SchemaTypes(self._schema)
        self._end = end
        self._untyped_text = untyped_text
        self._separator = "{"

    def value(self, key: str) -> Generator[None, None, bool]:
        """Read the value of ``key``, including its end. Returns false if the text ended first."""
        types = self._types_of(key)
        head = f"{self._separator}{json_string(key)}: "
        if types is not None and "string" in types and types <= TEXT_OR_NULL:
            return (yield from self._text(head, may_be_null="null" in types))
        text = _JsonOrText()
        ended = yield from read_value(
            self._reader, self._end, text.add, in_string=lambda: text.in_string
        )
        if ended:
            self._report(head + convert_argument(str(text), types))
        return ended

    def close(self) -> None:
        """End the object."""
        self._reader.arguments("{}" if self._separator == "{" else "}")

    def _text(self, head: str, *, may_be_null: bool) -> Generator[None, None, bool]:
        """Read a string. One that may be null is held until it is clear that it is not."""
        waiting: list[str] | None = [] if may_be_null else None
        if not may_be_null:
            self._report(f'{head}"')

        def keep(text: str) -> None:
            nonlocal waiting
            if waiting is None:
                self._report(escape(text))
                return
            waiting.append(text)
            whole = "".join(waiting)
            if not "null".startswith(whole.strip()) or len(whole) > MAX_SPACE:
                waiting = None
                self._report(f'{head}"{escape(whole)}')

        ended = yield from read_value(self._reader, self._end, keep)
        if not ended:
            return False
        if waiting is None:
            self._report('"')
        else:
            self._report(head + convert_argument("".join(waiting), TEXT_OR_NULL))
        return True

    def _report(self, text: str) -> None:
        self._separator = ", "
        self._reader.arguments(text)

    def _types_of(self, key: str) -> Types | None:
        types = self._types.of_property(key)
        if types is not None or not self._untyped_text:
            return types
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        has_variants = isinstance(schema, Mapping) and bool(schema.keys() & VARIANTS)
        return None if has_variants else TEXT


def read_value(
    reader: Reader, end: ValueEnd, to: Sink, *, in_string: Callable[[], bool] = lambda: False
) -> Generator[None, None, bool]:
    """Read a value ``to`` a sink, including its end. Returns false if the text ended first.
    ``in_string`` says whether the value is inside a JSON string, where a marker is text unless a
    line break is next to it."""
    at = 0  # text before this belongs to the value
    while True:
        match = first_of(reader.buffer, (end.marker, *end.breaks), at)
        if match is None:
            partial = partial_marker(reader.buffer, end.all)
            to(reader.take(max(at, len(reader.buffer) - partial)))
            at = 0
            if reader.ended:
                reader.take(len(reader.buffer))
                return False
            yield
            continue
        place, mark = match
        is_marker = mark == end.marker
        followers = end.followers if is_marker else end.breaks[mark]
        after = place + len(mark)
        ends = not followers or reader.followed_by(
            after, *followers, repeated=mark if is_marker else ""
        )
        if ends is False:
            at = after
            continue
        line = int(is_marker and end.on_line and reader.buffer[at:place].endswith("\n"))
        to(reader.take(place - line))
        at = 0
        if ends and not is_marker:
            return True
        rest = reader.buffer[line + len(mark) :]
        if ends and not (line or "\n" in rest[: -len(rest.lstrip())]) and in_string():
            at = len(mark)
            continue
        if ends:
            reader.take(line + len(mark))
            yield from reader.skip(mark)
            return True
        if reader.ended:
            reader.take(len(reader.buffer))
            return is_marker and bool(rest.strip())  # a follower has begun
        yield


def convert_argument(text: str, types: Types | None) -> str:
    """Convert an argument to JSON of one of ``types``, or of any type if ``None``. If it fits none,
    its own JSON is used, or a string."""
    plain = text.strip()
    fallback: str | None = None
    if types is None:
        return next(_candidates(plain), json_string(text))
    lowercase = plain.lower()
    for candidate in _candidates(lowercase if lowercase in _CONSTANTS else plain):
        value = _load(candidate)
        if fits(value, types):
            return candidate
        if isinstance(value, str):  # quotes around a value that is not a string
            inner = next((one for one in _candidates(value) if fits(_load(one), types)), None)
            if inner is not None:
                return inner
        fallback = fallback or candidate
    return fallback if fallback and "string" not in types else json_string(text)


def _candidates(text: str) -> Iterator[str]:
    """The text if it is JSON; otherwise its JSON if it is a Python literal."""
    try:
        _load(text)
        yield text
    except (ValueError, RecursionError):
        with suppress(ValueError):
            yield literal_to_json(text)


class _JsonOrText:
    """Text that may be JSON; ``in_string`` is true while it ends inside a JSON string."""

    def __init__(self) -> None:
        self.in_string = False
        self._parts: list[str] = []
        self._is_json: bool | None = None
        self._escaped = False

    def __str__(self) -> str:
        return "".join(self._parts)

    def add(self, text: str) -> None:
        self._parts.append(text)
        if self._is_json is None and (begin := text.lstrip()[:1]):
            self._is_json = begin in '{["'
        if not self._is_json or not text:
            return
        at, self._escaped = int(self._escaped), False
        while mark := _STRING_MARK.search(text, at):
            at = mark.end()
            if mark[0] == '"':
                self.in_string = not self.in_string
            elif at < len(text):
                at += 1
            else:
                self._escaped = True


def _load(text: str) -> Any:
    """Parse JSON, with lengths in place of integers, whose digits Python limits."""
    return json.loads(text, parse_int=len, parse_constant=_reject)


def _reject(constant: str) -> Any:
    raise ValueError(f"{constant} is not in JSON")
