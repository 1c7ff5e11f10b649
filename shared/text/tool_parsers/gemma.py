"""``call:f{key:<escape>text<escape>,other:1}`` between markers: FunctionGemma and Gemma 4."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from .json_call import verbatim_text
from .reader import NotACallError, Reader, Steps
from .tool_use import ToolUse
from .typed_value import escaped

MAX_NAME = 256
MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class GemmaMarkers:
    """The markers of one generation of models; ``quote`` is around strings."""

    start: str
    end: str
    quote: str

    @property
    def all(self) -> tuple[str, ...]:
        return self.start, self.end, self.quote


FUNCTION_GEMMA = GemmaMarkers("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = GemmaMarkers("<|tool_call>", "<tool_call|>", '<|"|>')


def gemma(markers: GemmaMarkers) -> Callable[[Reader, ToolUse], Steps]:
    """The parser of the models with these markers."""

    def parse(reader: Reader, tools: ToolUse) -> Steps:
        while (yield from reader.until(markers.start, to=reader.content)):
            yield from reader.attempt(_call(reader, tools, markers), after=markers.start)

    return parse


def text_opening(markers: GemmaMarkers, argument: str) -> str:
    """What comes before the text of an argument."""
    return f"{argument}:{markers.quote}"


def _call(reader: Reader, tools: ToolUse, markers: GemmaMarkers) -> Steps:
    yield from reader.skip_space()
    yield from reader.expect("call:")
    name = (yield from reader.capture("{", most=MAX_NAME)).strip()
    if not name:
        raise NotACallError
    reader.begin_call(name)
    argument = tools.verbatim.get(name, "")
    if argument and (yield from reader.accept(text_opening(markers, argument))):
        yield from verbatim_text(reader, argument)
        return
    yield from _object(reader, markers.quote, MAX_DEPTH)
    yield from reader.skip_space()
    yield from reader.accept(markers.end)


def _object(reader: Reader, quote: str, depth: int) -> Steps:
    """An object whose brace has been read; its keys are bare, or strings."""
    reader.arguments("{")
    yield from reader.skip_space()
    while not (yield from reader.accept("}")):
        if (yield from reader.accept(quote)):
            key = yield from reader.capture(quote, most=MAX_NAME)
            yield from reader.skip_space()
            yield from reader.expect(":")
        else:
            key = (yield from reader.capture(":", most=MAX_NAME)).strip()
        reader.arguments(json.dumps(key, ensure_ascii=False) + ": ")
        yield from _value(reader, quote, depth)
        if (yield from reader.accept(",")):
            reader.arguments(", ")
            yield from reader.skip_space()
    reader.arguments("}")


def _array(reader: Reader, quote: str, depth: int) -> Steps:
    reader.arguments("[")
    yield from reader.skip_space()
    while not (yield from reader.accept("]")):
        yield from _value(reader, quote, depth)
        if (yield from reader.accept(",")):
            reader.arguments(", ")
            yield from reader.skip_space()
    reader.arguments("]")


def _value(reader: Reader, quote: str, depth: int) -> Steps:
    """One value, and the white space after it."""
    if depth == 0:
        raise NotACallError
    yield from reader.skip_space()
    if (yield from reader.accept(quote)):
        yield from _string(reader, quote)
    elif (yield from reader.accept("{")):
        yield from _object(reader, quote, depth - 1)
    elif (yield from reader.accept("[")):
        yield from _array(reader, quote, depth - 1)
    else:
        yield from _word(reader)
    yield from reader.skip_space()


def _string(reader: Reader, quote: str) -> Steps:
    reader.arguments('"')
    if not (yield from reader.until(quote, to=lambda text: reader.arguments(escaped(text)))):
        raise NotACallError
    reader.arguments('"')


def _word(reader: Reader) -> Steps:
    """A number, true, false or null; another word is a string. What ends it stays."""
    parts: list[str] = []
    ended_by = yield from reader.until(",", "}", "]", to=parts.append)
    word = "".join(parts).strip()
    if not ended_by or not 0 < len(word) <= MAX_NAME:
        raise NotACallError
    reader.give_back(ended_by)
    try:
        json.loads(word)
    except ValueError:
        word = json.dumps(word, ensure_ascii=False)
    reader.arguments(word)
