"""``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and Qwen 3."""

from __future__ import annotations

from .json_call import json_call
from .reader import Reader, Steps
from .tool_use import ToolUse

START, END = "<tool_call>", "</tool_call>"
MARKERS = (START, END)


def hermes(reader: Reader, tools: ToolUse) -> Steps:
    """Any number of calls, with content before, between and after them."""

    def call(_: list[str]) -> Steps:
        yield from json_call(reader, tools, ends=MARKERS)
        yield from reader.skip("}")
        yield from reader.accept(END)

    yield from reader.marked_calls(call, (START,), (END,))
