"""``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``: Kimi
K2."""

from __future__ import annotations

from .json_call import call_arguments
from .reader import NotACallError, Reader, Steps
from .tool_use import ToolUse

START, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
MARKERS = (START, END, CALL, ARGUMENTS, CALL_END)
MAX_ID = 256


def kimi_k2(reader: Reader, tools: ToolUse) -> Steps:
    while marker := (yield from reader.until(START, CALL, to=reader.content)):
        yield from reader.attempt(_calls(reader, tools, marker), after=marker)


def _calls(reader: Reader, tools: ToolUse, marker: str) -> Steps:
    yield from reader.skip_space()
    if marker == START:
        yield from reader.expect(CALL)
    yield from _call(reader, tools)
    while (yield from reader.accept(CALL)):
        yield from _call(reader, tools)
    yield from reader.accept(END)


def _call(reader: Reader, tools: ToolUse) -> Steps:
    """The id contains the name, and goes back to the model with the result."""
    call_id = (yield from reader.capture(ARGUMENTS, most=MAX_ID)).strip()
    name = call_id.rpartition(":")[0].removeprefix("functions.")
    if not name:
        raise NotACallError
    reader.begin_call(name, call_id)
    yield from reader.skip_space()
    yield from call_arguments(reader, tools, name)
    yield from reader.skip_space()
    yield from reader.accept(CALL_END)
    yield from reader.skip_space()
