"""``[TOOL_CALLS]`` and an array, or a name with its arguments: Mistral, Magistral, Devstral."""

from __future__ import annotations

import secrets
import string

from .json_call import call_arguments
from .json_list import json_calls
from .reader import NotACallError, Reader, Steps
from .tool_use import ToolUse

START, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = (START, CALL_ID, ARGUMENTS)
MAX_NAME = 256


def mistral(reader: Reader, tools: ToolUse) -> Steps:
    """Calls of both kinds; content may precede them."""
    reader.new_id = mistral_call_id
    while (yield from reader.until(START, to=reader.content)):
        yield from reader.attempt(_calls(reader, tools), after=START)


def mistral_call_id() -> str:
    """A random id in the only form that Mistral's templates take back."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _calls(reader: Reader, tools: ToolUse) -> Steps:
    yield from reader.skip_space()
    yield from reader.need(1)
    if reader.held.startswith(("[", "{")):
        yield from json_calls(reader, tools)
        yield from reader.skip_space()
        return
    name, call_id = "", ""
    parts: list[str] = []
    ended_by = yield from reader.until("{", CALL_ID, ARGUMENTS, to=parts.append)
    name = "".join(parts).strip()
    if not ended_by or not 0 < len(name) <= MAX_NAME:
        raise NotACallError
    if ended_by == CALL_ID:
        call_id = (yield from reader.capture(ARGUMENTS, most=MAX_NAME)).strip()
    reader.begin_call(name, call_id)
    if ended_by == "{":
        reader.give_back("{")
    yield from reader.skip_space()
    yield from call_arguments(reader, tools, name)
    yield from reader.skip_space()
