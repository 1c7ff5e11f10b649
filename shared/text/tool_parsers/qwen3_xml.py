"""``<tool_call><function=f><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder
and later models of Qwen."""

from __future__ import annotations

from .json_call import verbatim_text
from .reader import NotACallError, Reader, Steps, discard
from .tool_use import ToolUse, is_name
from .typed_value import PlainArguments, ValueEnd

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKERS = (START, END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)
MAX_NAME = 256
END_OF_VALUE = ValueEnd(
    marker=PARAMETER_END,
    followers=(PARAMETER, FUNCTION_END, END, START, FUNCTION),
    breaks={f"\n{PARAMETER}": (), f"\n{FUNCTION_END}": (END, START, FUNCTION)},
    on_line=True,
)


def qwen3_xml(reader: Reader, tools: ToolUse) -> Steps:
    """Any number of calls. Models forget the outer marker, so a function alone is a call too."""

    def call(markers: list[str]) -> Steps:
        yield from _call(reader, tools, markers)

    yield from reader.marked_calls(call, (START, FUNCTION), (END, FUNCTION_END, PARAMETER_END))


def text_opening(argument: str) -> str:
    """The text before the value of an argument."""
    return f"\n{PARAMETER}{argument}>\n"


def _call(reader: Reader, tools: ToolUse, markers: list[str]) -> Steps:
    """Read a call up to its end marker. Other text between its arguments is dropped."""
    name, mark = yield from reader.capture_to(">", "\n", max_length=MAX_NAME)
    name = name.strip()
    if FUNCTION not in markers or not is_name(name):
        raise NotACallError
    if mark == "\n":
        reader.give_back(mark)
    # Without the outer marker, the inner one may be part of the text.
    is_call = START in markers or (yield from reader.comes_next(PARAMETER, FUNCTION_END))
    if is_call is False:
        raise NotACallError
    reader.begin_call(name)
    argument = tools.verbatim.get(name, "")
    if argument and (yield from reader.accept(text_opening(argument))):
        yield from verbatim_text(reader, argument)
        return
    arguments = PlainArguments(reader, tools, name, END_OF_VALUE, untyped_text=True)
    while marker := (yield from reader.until(PARAMETER, FUNCTION_END, END, *markers, to=discard)):
        if marker in (FUNCTION_END, END) and (yield from reader.comes_next(PARAMETER)):
            continue
        if marker != PARAMETER:
            break
        yield from reader.skip(PARAMETER)
        key: list[str] = []
        mark = yield from reader.until(">", "\n", to=key.append)
        if mark == ">":
            yield from reader.accept("\n")
        if not mark or not (yield from arguments.value("".join(key).strip())):
            return
    if not marker:
        return
    arguments.close()
    if marker in (START, FUNCTION):
        reader.give_back(marker)
    else:
        yield from reader.skip(FUNCTION_END)
        yield from reader.accept(END)
