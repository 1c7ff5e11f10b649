"""``<tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM 4.5 and
later."""

from __future__ import annotations

from .json_call import verbatim_text
from .reader import NotACallError, Reader, Steps, discard
from .tool_use import ToolUse, is_name
from .typed_value import PlainArguments, ValueEnd

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
MARKERS = (START, END, KEY, KEY_END, VALUE, VALUE_END)
MAX_NAME = 256
END_OF_VALUE = ValueEnd(
    marker=VALUE_END, followers=(KEY, END, START), breaks={f"\n{KEY}": (), f"\n{END}": ()}
)


def glm45(reader: Reader, tools: ToolUse) -> Steps:
    def call(_: list[str]) -> Steps:
        yield from _call(reader, tools)

    yield from reader.marked_calls(call, (START,), (END, KEY_END, VALUE_END))


def text_opening(argument: str) -> str:
    """The text before the value of an argument."""
    return f"{KEY}{argument}{KEY_END}\n{VALUE}"


def _call(reader: Reader, tools: ToolUse) -> Steps:
    """Read a call up to its end marker. Other text between its arguments is dropped."""
    name, mark = yield from reader.capture_to("\n", KEY, END, START, max_length=MAX_NAME)
    name = name.strip()
    if mark != "\n":
        reader.give_back(mark)
    if not is_name(name):
        raise NotACallError
    reader.begin_call(name)
    argument = tools.verbatim.get(name, "") if mark == "\n" else ""
    if argument and (yield from reader.accept(text_opening(argument))):
        yield from verbatim_text(reader, argument)
        return
    arguments = PlainArguments(reader, tools, name, END_OF_VALUE, untyped_text=False)
    while marker := (yield from reader.until(KEY, END, START, to=discard)):
        if marker == END and (yield from reader.comes_next(KEY)):
            continue
        if marker != KEY:
            break
        yield from reader.skip(KEY)
        key: list[str] = []
        mark = yield from reader.until(KEY_END, VALUE, to=key.append)
        if mark == KEY_END:
            yield from reader.skip(KEY_END)
        while (yield from reader.accept(VALUE)):
            pass
        if (yield from reader.at_end()) or not (yield from arguments.value("".join(key).strip())):
            return
    if marker:
        arguments.close()
    if marker == START:
        reader.give_back(marker)
