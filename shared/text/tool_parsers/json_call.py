"""Calls written as JSON objects: ``{"name": "f", "arguments": {...}}``."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator
from contextlib import suppress
from typing import Any

from .json_text import JsonText, escape, repair_object
from .reader import MAX_BUFFERED, NotACallError, Reader, Steps, discard
from .tool_use import ToolUse

ARGUMENT_KEYS = ("arguments", "parameters")
# Between the name of an argument and its text, if the text is verbatim.
QUOTES = '"""\n'


def json_call(
    reader: Reader, tools: ToolUse, *, ends: tuple[str, ...] = (), known: bool = False
) -> Steps:
    """Read the object of a call, with keys in any order; it may be cut short by one of ``ends``.
    Raises ``NotACallError`` for anything else, and for an unknown function if ``known``."""
    name, early = yield from _up_to_name(reader, tools.schemas if known else None)
    reader.begin_call(name)
    if early is not None:
        reader.arguments(_as_arguments(early))
    yield from _after_name(reader, tools, name, ends, has_arguments=early is not None)


def call_arguments(
    reader: Reader, tools: ToolUse, name: str, *ends: str
) -> Generator[None, None, bool]:
    """Read the arguments of the current call, which may be a single verbatim text, up to one of
    ``ends`` at the latest. Returns false if the text ended first."""
    argument = tools.verbatim.get(name, "")
    if argument and (yield from reader.accept(text_opening(argument))):
        yield from verbatim_text(reader, argument)
        return True
    return (yield from stream_arguments(reader, *ends))


def text_opening(argument: str) -> str:
    """The arguments up to a verbatim text."""
    return f"{{{json.dumps(argument)}: {QUOTES}"


def verbatim_text(reader: Reader, argument: str) -> Steps:
    """Read the verbatim argument of the current call, up to the end of the output: a grammar could
    not be followed inside a JSON string."""
    reader.verbatim = True
    reader.arguments(f'{{{json.dumps(argument)}:"')
    while not (yield from reader.at_end()):
        reader.arguments(escape(reader.take(len(reader.buffer))))
    reader.arguments('"}')


def stream_arguments(reader: Reader, *ends: str, quote: str = "") -> Generator[None, None, bool]:
    """Read the arguments of the current call: an object, or a string or null in place of one. They
    end with the object or at one of ``ends``, where it is closed. Returns false if the text ended
    first, which leaves the object open."""
    yield from reader.skip_space()
    yield from reader.need(1)
    if reader.buffer.startswith("{"):
        value = JsonText(reader, reader.arguments, ends=ends, quote=quote)
        if (yield from value.read()):
            return True
        if not (yield from reader.next_is(*ends)):
            return False
        value.close()
        return True
    parts: list[str] = []
    ended = yield from JsonText(reader, parts.append, ends=ends).read()
    if not ended and (yield from reader.at_end()):
        return False
    reader.arguments(_as_arguments("".join(parts)))
    return True


def capture_value(reader: Reader, max_length: int = MAX_BUFFERED) -> Generator[None, None, str]:
    """The text of a JSON value. Raises ``NotACallError`` if there is none, or if it has more than
    ``max_length`` characters."""
    parts: list[str] = []
    remaining = max_length

    def keep(text: str) -> None:
        nonlocal remaining
        remaining -= len(text)
        if remaining < 0:
            raise NotACallError
        parts.append(text)

    if not (yield from JsonText(reader, keep).read()):
        raise NotACallError
    return "".join(parts)


def capture_string(reader: Reader) -> Generator[None, None, str]:
    """The value of a JSON string. Raises ``NotACallError`` if there is none."""
    yield from reader.expect('"')
    parts = ['"']
    while parts[-1] != '"' or len(parts) == 1:
        text, mark = yield from reader.capture_to('"', "\\")
        parts += [text, mark]
        if mark == "\\":
            yield from reader.need(1)
            parts[-1] += reader.take(1)
    value: str = _parse("".join(parts))
    return value


def _up_to_name(
    reader: Reader, names: Collection[str] | None
) -> Generator[None, None, tuple[str, str | None]]:
    """Read the object up to the name; return the name, and the arguments before it."""
    early: str | None = None
    yield from reader.expect("{")
    yield from reader.skip_space()
    while (key := (yield from _key(reader))) != "name":
        value = yield from capture_value(reader)
        if key in ARGUMENT_KEYS:
            early = value
        yield from reader.skip_space()
        yield from reader.expect(",")
        yield from reader.skip_space()
    name = yield from capture_string(reader)
    if not name.strip() or (names is not None and name not in names):
        raise NotACallError
    return name, early


def _after_name(
    reader: Reader, tools: ToolUse, name: str, ends: tuple[str, ...], *, has_arguments: bool
) -> Steps:
    """Read the rest of the object. Models forget the closing brace, so after the arguments any
    other text is outside."""
    with suppress(NotACallError):
        while (yield from _more_keys(reader)):
            key = yield from _key(reader)
            if key not in ARGUMENT_KEYS or has_arguments:
                yield from capture_value(reader)
            elif (yield from call_arguments(reader, tools, name, *ends)):
                has_arguments = True
            else:
                return
    if has_arguments:
        yield from reader.accept("}")
        return
    marker = yield from reader.until("}", *ends, to=discard)
    if marker:
        reader.arguments("{}")
    if marker in ends:
        reader.give_back(marker)


def _key(reader: Reader) -> Generator[None, None, str]:
    """Read a key, and the colon after it."""
    key = yield from capture_string(reader)
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from reader.skip_space()
    return key


def _more_keys(reader: Reader) -> Generator[None, None, bool]:
    """Read the comma before another key. Returns false if none comes next."""
    yield from reader.skip_space()
    if (yield from reader.accept(",")):
        yield from reader.skip_space()
        yield from reader.need(1)
        return not reader.buffer.startswith("}")
    return False


def _as_arguments(value: str) -> str:
    """The arguments in a JSON value: an object, or a string that contains one."""
    if value.startswith("{"):
        return value
    return repair_object(_parse(value)) if value.startswith('"') else "{}"


def _parse(text: str) -> Any:
    """Parse JSON. Raises ``NotACallError`` if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotACallError from None
