"""Arguments that are written as plain text, turned into JSON by the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..markers import first_of, held_back
from .json_text import escaped, escaped_string
from .python_literal import literal_to_json
from .reader import MAX_SPACE, Reader, Sink
from .schema_types import SchemaTypes, Types, fits
from .tool_use import ToolUse

TEXT: Types = frozenset(("string",))
TEXT_OR_NULL: Types = frozenset(("string", "null"))
# Keywords of an untyped argument that may be of any type.
VARIANTS = frozenset(("anyOf", "oneOf", "allOf", "$ref"))
# As models write them, in any case.
_CONSTANTS = ("true", "false", "null")
_STRING_MARK = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEnd:
    """How a value ends: at ``marker`` if one of ``followers`` is next, as the marker may also be a
    part of the value; or, as models forget the marker, before one of ``breaks``, some of which have
    to be followed by others. A line break before the marker belongs to it if it is ``on_line`` of
    its own."""

    marker: str
    followers: tuple[str, ...]
    breaks: Mapping[str, tuple[str, ...]]
    on_line: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        own = (f"\n{self.marker}", self.marker) if self.on_line else (self.marker,)
        return *own, *self.breaks


class PlainArguments:
    """Reads the arguments of one call, and reports them as one JSON object, key by key. The text of
    strings is reported as it arrives; ``untyped_text`` says that arguments without a type are
    strings."""

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
        """Read the value of ``key``, and its end. Returns whether it has ended."""
        types = self._types_of(key)
        head = f"{self._separator}{escaped_string(key)}: "
        if types is not None and "string" in types and types <= TEXT_OR_NULL:
            return (yield from self._text(head, may_be_null="null" in types))
        text = _JsonOrText()
        ended = yield from read_value(
            self._reader, self._end, text.add, in_string=lambda: text.in_string
        )
        if ended:
            self._report(head + converted(str(text), types))
        return ended

    def close(self) -> None:
        """End the object."""
        self._reader.arguments("{}" if self._separator == "{" else "}")

    def _text(self, head: str, *, may_be_null: bool) -> Generator[None, None, bool]:
        """Read a string. One that may be null waits until it is clear that it is not."""
        waiting: list[str] | None = [] if may_be_null else None
        if not may_be_null:
            self._report(f'{head}"')

        def keep(text: str) -> None:
            nonlocal waiting
            if waiting is None:
                self._report(escaped(text))
                return
            waiting.append(text)
            whole = "".join(waiting)
            if not "null".startswith(whole.strip()) or len(whole) > MAX_SPACE:
                waiting = None
                self._report(f'{head}"{escaped(whole)}')

        ended = yield from read_value(self._reader, self._end, keep)
        if not ended:
            return False
        if waiting is None:
            self._report('"')
        else:
            self._report(head + converted("".join(waiting), TEXT_OR_NULL))
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
    """Read a value ``to`` a sink, and its end. Returns false if the text ended first. ``in_string``
    says whether the value is a JSON string here, in which a marker is text, unless there is a line
    break at it."""
    at = 0  # the text before it belongs to the value
    while True:
        found = first_of(reader.held, (end.marker, *end.breaks), at)
        if found is None:
            kept = held_back(reader.held, end.all)
            to(reader.take(max(at, len(reader.held) - kept)))
            at = 0
            if reader.ended:
                reader.take(len(reader.held))
                return False
            yield
            continue
        place, mark = found
        is_marker = mark == end.marker
        followers = end.followers if is_marker else end.breaks[mark]
        after = place + len(mark)
        ends = not followers or reader.followed_by(
            after, *followers, repeated=mark if is_marker else ""
        )
        if ends is False:
            at = after
            continue
        line = int(is_marker and end.on_line and reader.held[at:place].endswith("\n"))
        to(reader.take(place - line))
        at = 0
        if ends and not is_marker:
            return True
        rest = reader.held[line + len(mark) :]
        if ends and not (line or "\n" in rest[: -len(rest.lstrip())]) and in_string():
            at = len(mark)
            continue
        if ends:
            reader.take(line + len(mark))
            yield from reader.skip(mark)
            return True
        if reader.ended:
            reader.take(len(reader.held))
            return is_marker and bool(rest.strip())  # what has begun there is a follower
        yield


def converted(text: str, types: Types | None) -> str:
    """The JSON of an argument of these types, or of any. One that cannot be of them is what it is
    by itself, or a string."""
    plain = text.strip()
    found: str | None = None
    if types is None:
        return next(_candidates(plain), escaped_string(text))
    lowered = plain.lower()
    for candidate in _candidates(lowered if lowered in _CONSTANTS else plain):
        value = _loaded(candidate)
        if fits(value, types):
            return candidate
        if isinstance(value, str):  # quotes around what is no string
            inner = next((one for one in _candidates(value) if fits(_loaded(one), types)), None)
            if inner is not None:
                return inner
        found = found or candidate
    return found if found and "string" not in types else escaped_string(text)


def _candidates(text: str) -> Iterator[str]:
    """A text if it is JSON; otherwise what it is in Python, if anything."""
    try:
        _loaded(text)
        yield text
    except (ValueError, RecursionError):
        with suppress(ValueError):
            yield literal_to_json(text)


class _JsonOrText:
    """A text that may be JSON, and whether it has ended inside of a string of that."""

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


def _loaded(text: str) -> Any:
    """The value of a JSON text, with another number for each integer: Python's have a limit."""
    return json.loads(text, parse_int=len, parse_constant=_reject)


def _reject(constant: str) -> Any:
    raise ValueError(f"{constant} is not in JSON")
