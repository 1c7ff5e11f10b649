"""``[TOOL_CALLS]`` and an array, or a name with its arguments: Mistral, Magistral, Devstral."""

from __future__ import annotations

import secrets
import string

from .json_call import call_arguments
from .json_list import json_calls
from .reader import NotACallError, Reader, Steps
from .tool_use import ToolUse, is_name

START, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = (START, CALL_ID, ARGUMENTS)
MAX_NAME = 256


def mistral(reader: Reader, tools: ToolUse) -> Steps:
    """Calls in both forms; content may precede them."""
    reader.new_id = mistral_call_id

    def call(_: list[str]) -> Steps:
        yield from _calls(reader, tools)
        yield from reader.skip("}", "]")

    yield from reader.marked_calls(call, (START,))


def mistral_call_id() -> str:
    """A random id in the only form that Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _calls(reader: Reader, tools: ToolUse) -> Steps:
    yield from reader.need(1)
    if reader.buffer.startswith("{") or (
        reader.buffer.startswith("[") and not (yield from reader.next_is(CALL_ID, ARGUMENTS))
    ):
        yield from json_calls(reader, tools, ends=(START,))
        return
    marks = ("{", *MARKERS)
    name, marker = yield from reader.capture_to(*marks, max_length=MAX_NAME)
    name, call_id = name.strip(), ""
    if marker == CALL_ID:
        yield from reader.skip(CALL_ID)
        call_id, marker = yield from reader.capture_to(*marks, max_length=MAX_NAME)
    if marker != ARGUMENTS:
        reader.give_back(marker)
    if marker not in ("{", ARGUMENTS) or not is_name(name):
        raise NotACallError
    reader.begin_call(name, call_id.strip())
    yield from reader.skip(ARGUMENTS)
    yield from call_arguments(reader, tools, name, START)
