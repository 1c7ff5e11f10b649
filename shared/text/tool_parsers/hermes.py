"""``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and Qwen 3."""

from __future__ import annotations

import json

from .json_call import json_call
from .json_list import verbatim_call
from .reader import Reader, Steps
from .tool_use import ToolUse

START, END = "<tool_call>", "</tool_call>"
MARKERS = (START, END)


def hermes(reader: Reader, tools: ToolUse) -> Steps:
    """Any number of calls, with content before, between and after them."""
    while (yield from reader.until(START, to=reader.content)):
        yield from reader.attempt(_call(reader, tools), after=START)


def opening(name: str) -> str:
    """What models write before the arguments of a call."""
    return f'{{"name": {json.dumps(name)}, "arguments": '


def _call(reader: Reader, tools: ToolUse) -> Steps:
    yield from reader.skip_space()
    if (yield from verbatim_call(reader, tools, opening)):
        return
    yield from json_call(reader)
    yield from reader.skip_space()
    yield from reader.accept(END)
