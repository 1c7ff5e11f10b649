"""``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``: Kimi
K2."""

from __future__ import annotations

import re

from .json_call import call_arguments
from .reader import NotACallError, Reader, Steps
from .tool_use import ToolUse, is_name

START, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
MARKERS = (START, END, CALL, ARGUMENTS, CALL_END)
MAX_ID = 256
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


def kimi_k2(reader: Reader, tools: ToolUse) -> Steps:
    def call(_: list[str]) -> Steps:
        yield from _call(reader, tools)

    yield from reader.marked_calls(call, (START, CALL), (CALL_END, END))


def _unused_id(reader: Reader, name: str, call_id: str) -> str:
    """The id, or a similar one if an earlier call of the output has it."""
    number = reader.calls
    while call_id in reader.call_ids:
        call_id, number = f"functions.{name}:{number}", number + 1
    return call_id


def _call(reader: Reader, tools: ToolUse) -> Steps:
    """Read a call. Its id contains the name, and returns to the model with the result."""
    call_id, marker = yield from reader.capture_to("{", *MARKERS, max_length=MAX_ID)
    if marker != ARGUMENTS:
        reader.give_back(marker)
    match = _ID.fullmatch(call_id.strip())
    if marker in (START, CALL, END) or match is None or not is_name(match[1]):
        raise NotACallError
    reader.begin_call(match[1], _unused_id(reader, match[1], call_id.strip()))
    yield from reader.skip(ARGUMENTS)
    if (yield from call_arguments(reader, tools, match[1], CALL_END, CALL, END, START)):
        yield from reader.skip("}", CALL_END)
        yield from reader.accept(END)
