"""Calls between DeepSeek's markers: a name and arguments, which V3 writes in a fence."""

from __future__ import annotations

from .json_call import call_arguments
from .reader import NotACallError, Reader, Steps
from .tool_use import ToolUse

START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKERS = (START, END, CALL, SEPARATOR, CALL_END)
FENCE = "```"
MAX_NAME = 256


def deepseek_v3(reader: Reader, tools: ToolUse) -> Steps:
    """V3 and R1: the kind of call, its name, and a fence of JSON."""
    while marker := (yield from reader.until(START, CALL, to=reader.content)):
        yield from reader.attempt(_calls(reader, tools, marker, fenced=True), after=marker)


def deepseek_v31(reader: Reader, tools: ToolUse) -> Steps:
    """V3.1: the name and JSON."""
    while marker := (yield from reader.until(START, CALL, to=reader.content)):
        yield from reader.attempt(_calls(reader, tools, marker, fenced=False), after=marker)


def _calls(reader: Reader, tools: ToolUse, marker: str, fenced: bool) -> Steps:
    yield from reader.skip_space()
    if marker == START:
        yield from reader.expect(CALL)
    yield from _call(reader, tools, fenced)
    while (yield from reader.accept(CALL)):
        yield from _call(reader, tools, fenced)
    yield from reader.accept(END)


def _call(reader: Reader, tools: ToolUse, fenced: bool) -> Steps:
    name = yield from reader.capture(SEPARATOR, most=MAX_NAME)
    if fenced:  # what came before the separator is the word "function"
        name = yield from reader.capture("\n", most=MAX_NAME)
    if not name.strip():
        raise NotACallError
    reader.begin_call(name.strip())
    yield from reader.skip_space()
    if (yield from reader.accept(FENCE)):
        yield from reader.accept("json")
        yield from reader.skip_space()
    yield from call_arguments(reader, tools, name.strip())
    yield from reader.skip_space()
    yield from reader.accept(FENCE)
    yield from reader.accept(CALL_END)
    yield from reader.skip_space()
