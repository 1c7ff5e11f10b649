"""Calls between DeepSeek's markers: a name and arguments, which V3 writes in a fence."""

from __future__ import annotations

from collections.abc import Generator

from .json_call import call_arguments
from .reader import NotACallError, Reader, Steps
from .tool_use import ToolUse, is_name

START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKERS = (START, END, CALL, SEPARATOR, CALL_END)
FENCE = "```"
MAX_NAME = 256


def deepseek_v3(reader: Reader, tools: ToolUse) -> Steps:
    """V3 and R1: the word "function", the name, and JSON in a fence."""
    yield from _calls(reader, tools, fenced=True)


def deepseek_v31(reader: Reader, tools: ToolUse) -> Steps:
    """V3.1: the name and JSON."""
    yield from _calls(reader, tools, fenced=False)


def _calls(reader: Reader, tools: ToolUse, *, fenced: bool) -> Steps:
    def call(_: list[str]) -> Steps:
        yield from _call(reader, tools, fenced)

    yield from reader.marked_calls(call, (START, CALL), (CALL_END, END))


def _call(reader: Reader, tools: ToolUse, fenced: bool) -> Steps:
    name = yield from _header(reader, SEPARATOR)
    yield from reader.skip(SEPARATOR)
    if fenced:  # the text before the separator is the word "function"
        name = yield from _header(reader, "\n", FENCE, "{")
    if not is_name(name):
        raise NotACallError
    reader.begin_call(name)
    yield from reader.skip(f"{FENCE}json", FENCE)
    if (yield from call_arguments(reader, tools, name, FENCE, CALL_END, CALL, END, START)):
        yield from reader.skip("}", FENCE, CALL_END)
        yield from reader.accept(END)


def _header(reader: Reader, *ends: str) -> Generator[None, None, str]:
    """Read up to one of ``ends``, and past it if it is a separator. Raises ``NotACallError`` at any
    other marker."""
    text, marker = yield from reader.capture_to(*ends, *MARKERS, max_length=MAX_NAME)
    if marker != SEPARATOR:
        reader.give_back(marker)
    if marker not in ends:
        raise NotACallError
    return text.strip()
