"""``<tool_call><function=f><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder
and later models of Qwen."""

from __future__ import annotations

from .json_call import verbatim_text
from .reader import Reader, Steps
from .tool_use import ToolUse
from .typed_value import PlainArguments

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKERS = (START, END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)
MAX_NAME = 256


def qwen3_xml(reader: Reader, tools: ToolUse) -> Steps:
    """Any number of calls. Models forget the outer marker, so a function is one without it too."""
    while marker := (yield from reader.until(START, FUNCTION, to=reader.content)):
        yield from reader.attempt(_call(reader, tools, marker), after=marker)


def text_opening(argument: str) -> str:
    """What comes before the text of an argument."""
    return f"\n{PARAMETER}{argument}>\n"


def _call(reader: Reader, tools: ToolUse, marker: str) -> Steps:
    if marker == START:
        yield from reader.skip_space()
        yield from reader.expect(FUNCTION)
    name = (yield from reader.capture(">", most=MAX_NAME)).strip()
    reader.begin_call(name)
    argument = tools.verbatim.get(name, "")
    if argument and (yield from reader.accept(text_opening(argument))):
        yield from verbatim_text(reader, argument)
        return
    arguments = PlainArguments(reader, tools, name, untyped_text=True)
    yield from reader.skip_space()
    while (yield from reader.accept(PARAMETER)):
        key = (yield from reader.capture(">", most=MAX_NAME)).strip()
        yield from reader.accept("\n")
        if not (yield from arguments.value(key, f"\n{PARAMETER_END}", PARAMETER_END)):
            return
        yield from reader.skip_space()
    if (yield from reader.at_end()):
        return
    arguments.close()
    yield from reader.accept(FUNCTION_END)
    yield from reader.skip_space()
    yield from reader.accept(END)
