"""Calls written as JSON objects: ``{"name": "f", "arguments": {...}}``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator
from typing import Any

from .reader import MAX_BUFFERED, NotACallError, Reader, Sink, Steps
from .tool_use import ToolUse
from .typed_value import escaped

ARGUMENT_KEYS = ("arguments", "parameters")
# Between the name of an argument and its text, if that is written as it is.
QUOTES = '"""\n'
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")


class JsonExtent:
    """Finds the end of one JSON value, of which white space is no part. Counts brackets only, so an
    invalid value ends somewhere too."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False

    def end_in(self, text: str) -> int | None:
        """The position in the next piece of text at which the value ends, or ``None``."""
        at = 0
        while at < len(text):
            if self._in_string:
                at = self._skip_string(text, at)
                if self._in_string or self._depth:
                    continue
                return at
            if self._scalar or (not self._depth and text[at] not in '"{['):
                self._scalar = True
                end = _SCALAR_END.search(text, at)
                return end.start() if end else None
            mark = _STRUCTURE.search(text, at)
            if mark is None:
                return None
            at = mark.end()
            self._in_string = mark[0] == '"'
            self._depth += (mark[0] in "{[") - (mark[0] in "}]")
            if not self._depth and not self._in_string:
                return at
        return None

    def _skip_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        mark = _STRING_END.search(text, at)
        if mark is None:
            return len(text)
        self._escaped = mark[0] == "\\"
        self._in_string = self._escaped
        return mark.end()


def json_value(reader: Reader, to: Sink) -> Generator[None, None, bool]:
    """Read a JSON value, as it is written. Returns whether it ended before the text did."""
    extent = JsonExtent()
    while True:
        end = extent.end_in(reader.held)
        to(reader.take(len(reader.held) if end is None else end))
        if end is not None or reader.ended:
            return end is not None
        yield


def captured_value(reader: Reader, most: int = MAX_BUFFERED) -> Generator[None, None, str]:
    """The text of a JSON value. Raises ``NotACallError`` if there is none, or one of more than
    ``most`` characters."""
    parts: list[str] = []
    length = 0

    def keep(text: str) -> None:
        nonlocal length
        length += len(text)
        if length > most:
            raise NotACallError
        parts.append(text)

    if not (yield from json_value(reader, keep)):
        raise NotACallError
    return "".join(parts)


def captured_string(reader: Reader) -> Generator[None, None, str]:
    """The value of a JSON string."""
    yield from reader.need(1)
    if not reader.held.startswith('"'):
        raise NotACallError
    value: str = parsed((yield from captured_value(reader)))
    return value


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises ``NotACallError`` if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotACallError from None


def json_call(reader: Reader, tools: ToolUse, *, known: bool = False) -> Steps:
    """Read a call's object, whose keys may have any order. Raises ``NotACallError`` if it is none,
    or if it must be of a ``known`` function and is not."""
    yield from reader.expect("{")
    begun = ""  # the name, once it has been reported
    early: str | None = None  # arguments before the name
    complete = False
    yield from reader.skip_space()
    while not (yield from reader.accept("}")):
        key = yield from captured_string(reader)
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        if key == "name" and not begun:
            begun = yield from _begin(reader, tools.schemas if known else None)
            if early is not None:
                reader.arguments(as_arguments(early))
        elif key in ARGUMENT_KEYS and begun:
            yield from call_arguments(reader, tools, begun)
            complete = True
        else:
            value = yield from captured_value(reader)
            if key in ARGUMENT_KEYS:
                early, complete = value, True
        if not (yield from _more_keys(reader)):
            # Models forget the last brace.
            if not (begun and complete):
                raise NotACallError
            break
    if not begun:
        raise NotACallError
    if not complete:
        reader.arguments("{}")


def call_arguments(reader: Reader, tools: ToolUse, name: str) -> Steps:
    """Read the arguments of the call that has begun, which may be one text, written as it is."""
    argument = tools.verbatim.get(name, "")
    if argument and (yield from reader.accept(text_opening(argument))):
        yield from verbatim_text(reader, argument)
        return
    yield from streamed_arguments(reader)


def text_opening(argument: str) -> str:
    """What comes before the text in arguments."""
    return f"{{{json.dumps(argument)}: {QUOTES}"


def verbatim_text(reader: Reader, argument: str) -> Steps:
    """Read the text of the call that has begun, up to the end of the output: a grammar cannot be
    followed inside a JSON string."""
    reader.arguments(f'{{{json.dumps(argument)}:"')
    while not (yield from reader.at_end()):
        reader.arguments(escaped(reader.take(len(reader.held))))
    reader.arguments('"}')


def streamed_arguments(reader: Reader) -> Steps:
    """Read the arguments of the call that has begun: an object, or a string or null for one."""
    yield from reader.need(1)
    if reader.held.startswith(("{", "[")):
        yield from json_value(reader, reader.arguments)
    else:
        reader.arguments(as_arguments((yield from captured_value(reader))))


def as_arguments(value: str) -> str:
    """Arguments that may be written as a string that contains an object, or as null."""
    if value == "null":
        return "{}"
    if not value.startswith('"'):
        return value
    try:
        text: str = json.loads(value)
    except ValueError:
        return value
    return text if text.lstrip().startswith("{") else value


def _begin(reader: Reader, known: Collection[str] | None) -> Generator[None, None, str]:
    name = yield from captured_string(reader)
    if not name or (known is not None and name not in known):
        raise NotACallError
    reader.begin_call(name)
    return name


def _more_keys(reader: Reader) -> Generator[None, None, bool]:
    """Read the comma before another key; the closing brace stays. Returns false if neither comes
    next."""
    yield from reader.skip_space()
    if (yield from reader.accept(",")):
        yield from reader.skip_space()
        return True
    yield from reader.need(1)
    return reader.held.startswith("}")
