"""``<tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM 4.5 and
later."""

from __future__ import annotations

from .json_call import verbatim_text
from .reader import NotACallError, Reader, Steps
from .tool_use import ToolUse
from .typed_value import PlainArguments

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
MARKERS = (START, END, KEY, KEY_END, VALUE, VALUE_END)
MAX_NAME = 256


def glm45(reader: Reader, tools: ToolUse) -> Steps:
    while (yield from reader.until(START, to=reader.content)):
        yield from reader.attempt(_call(reader, tools), after=START)


def text_opening(argument: str) -> str:
    """What comes before the text of an argument."""
    return f"{KEY}{argument}{KEY_END}\n{VALUE}"


def _call(reader: Reader, tools: ToolUse) -> Steps:
    parts: list[str] = []
    yield from reader.skip_space()
    ended_by = yield from reader.until("\n", KEY, END, to=parts.append)
    name = "".join(parts).strip()
    if not ended_by or not 0 < len(name) <= MAX_NAME or "{" in name:
        raise NotACallError
    reader.begin_call(name)
    argument = tools.verbatim.get(name, "") if ended_by == "\n" else ""
    if argument and (yield from reader.accept(text_opening(argument))):
        yield from verbatim_text(reader, argument)
        return
    arguments = PlainArguments(reader, tools, name, untyped_text=False)
    if ended_by == "\n":
        yield from reader.skip_space()
    while ended_by == KEY or (ended_by == "\n" and (yield from reader.accept(KEY))):
        key = (yield from reader.capture(KEY_END, most=MAX_NAME)).strip()
        yield from reader.skip_space()
        yield from reader.expect(VALUE)
        if not (yield from arguments.value(key, VALUE_END)):
            return
        yield from reader.skip_space()
        ended_by = "\n"
    if ended_by != END and (yield from reader.at_end()):
        return
    arguments.close()
    if ended_by != END:
        yield from reader.accept(END)
