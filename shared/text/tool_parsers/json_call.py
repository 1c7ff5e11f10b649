"""Calls written as JSON objects: ``{"name": "f", "arguments": {...}}``."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator
from contextlib import suppress
from typing import Any

from .json_text import JsonText, escaped, repaired_object
from .reader import MAX_BUFFERED, NotACallError, Reader, Steps, dropped
from .tool_use import ToolUse

ARGUMENT_KEYS = ("arguments", "parameters")
# Between the name of an argument and its text, if that is written as it is.
QUOTES = '"""\n'


def json_call(
    reader: Reader, tools: ToolUse, *, ends: tuple[str, ...] = (), known: bool = False
) -> Steps:
    """Read a call's object, whose keys may have any order, or a part of it: one of ``ends`` is the
    end of the call too. Raises ``NotACallError`` if it is none, or if it must be of a ``known``
    function and is not."""
    name, early = yield from _up_to_name(reader, tools.schemas if known else None)
    reader.begin_call(name)
    if early is not None:
        reader.arguments(_as_arguments(early))
    yield from _after_name(reader, tools, name, ends, has_arguments=early is not None)


def call_arguments(
    reader: Reader, tools: ToolUse, name: str, *ends: str
) -> Generator[None, None, bool]:
    """Read the arguments of the call that has begun, which may be one text, written as it is, up to
    one of ``ends`` at the latest. Returns whether they have ended before the text did."""
    argument = tools.verbatim.get(name, "")
    if argument and (yield from reader.accept(text_opening(argument))):
        yield from verbatim_text(reader, argument)
        return True
    return (yield from streamed_arguments(reader, *ends))


def text_opening(argument: str) -> str:
    """What comes before the text in arguments."""
    return f"{{{json.dumps(argument)}: {QUOTES}"


def verbatim_text(reader: Reader, argument: str) -> Steps:
    """Read the text of the call that has begun, up to the end of the output: a grammar cannot be
    followed inside a JSON string."""
    reader.verbatim = True
    reader.arguments(f'{{{json.dumps(argument)}:"')
    while not (yield from reader.at_end()):
        reader.arguments(escaped(reader.take(len(reader.held))))
    reader.arguments('"}')


def streamed_arguments(reader: Reader, *ends: str, quote: str = "") -> Generator[None, None, bool]:
    """Read the arguments of the call that has begun: an object, or a string or null for one. They
    end with it, or at one of ``ends``, and are an object then, if only an empty one. Returns false
    if the text ended first; what there is of them stays open."""
    yield from reader.skip_space()
    yield from reader.need(1)
    if reader.held.startswith("{"):
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


def captured_value(reader: Reader, most: int = MAX_BUFFERED) -> Generator[None, None, str]:
    """The text of a JSON value. Raises ``NotACallError`` if there is none, or one of more than
    ``most`` characters."""
    parts: list[str] = []
    left = most

    def keep(text: str) -> None:
        nonlocal left
        left -= len(text)
        if left < 0:
            raise NotACallError
        parts.append(text)

    if not (yield from JsonText(reader, keep).read()):
        raise NotACallError
    return "".join(parts)


def captured_string(reader: Reader) -> Generator[None, None, str]:
    """The value of a JSON string. Raises ``NotACallError`` if there is none."""
    yield from reader.expect('"')
    parts = ['"']
    while parts[-1] != '"' or len(parts) == 1:
        text, mark = yield from reader.capture_to('"', "\\")
        parts += [text, mark]
        if mark == "\\":
            yield from reader.need(1)
            parts[-1] += reader.take(1)
    value: str = _parsed("".join(parts))
    return value


def _up_to_name(
    reader: Reader, known: Collection[str] | None
) -> Generator[None, None, tuple[str, str | None]]:
    """Read the object up to the name; that, and the arguments before it."""
    early: str | None = None
    yield from reader.expect("{")
    yield from reader.skip_space()
    while (key := (yield from _key(reader))) != "name":
        value = yield from captured_value(reader)
        if key in ARGUMENT_KEYS:
            early = value
        yield from reader.skip_space()
        yield from reader.expect(",")
        yield from reader.skip_space()
    name = yield from captured_string(reader)
    if not name.strip() or (known is not None and name not in known):
        raise NotACallError
    return name, early


def _after_name(
    reader: Reader, tools: ToolUse, name: str, ends: tuple[str, ...], *, has_arguments: bool
) -> Steps:
    """Read the rest of the object. Models forget its brace, so after the arguments any other text
    is none of it."""
    with suppress(NotACallError):
        while (yield from _more_keys(reader)):
            key = yield from _key(reader)
            if key not in ARGUMENT_KEYS or has_arguments:
                yield from captured_value(reader)
            elif (yield from call_arguments(reader, tools, name, *ends)):
                has_arguments = True
            else:
                return
    if has_arguments:
        yield from reader.accept("}")
        return
    marker = yield from reader.until("}", *ends, to=dropped)
    if marker:
        reader.arguments("{}")
    if marker in ends:
        reader.give_back(marker)


def _key(reader: Reader) -> Generator[None, None, str]:
    """Read a key, and what is between it and its value."""
    key = yield from captured_string(reader)
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
        return not reader.held.startswith("}")
    return False


def _as_arguments(value: str) -> str:
    """The arguments that a JSON value is: an object, or a string that contains one."""
    if value.startswith("{"):
        return value
    return repaired_object(_parsed(value)) if value.startswith('"') else "{}"


def _parsed(text: str) -> Any:
    """The value of a JSON text. Raises ``NotACallError`` if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotACallError from None
