"""Arrays of calls, and single ones, as JSON: Phi-4-mini, Granite 3, Llama 3, and models that write
nothing but JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator

from .json_call import json_call, streamed_arguments
from .reader import Reader, Steps
from .tool_use import ToolUse
from .typed_value import escaped

PYTHON_TAG = "<|python_tag|>"
FENCE = "```"
PHI4 = "functools"
GRANITE = ("<|tool_call|>", "<tool_call>")
GRANITE_END = "</tool_call>"
GRANITE_20B = "<function_call>"
# Between the name of an argument and its text, if that is written as it is.
QUOTES = '"""\n'


def calls_after(*markers: str, end: str = "") -> Callable[[Reader, ToolUse], Steps]:
    """A parser of calls that follow one of ``markers``, which text may precede."""

    def parse(reader: Reader, tools: ToolUse) -> Steps:
        while marker := (yield from reader.until(*markers, to=reader.content)):
            yield from reader.attempt(_after_marker(reader, end), after=marker)

    return parse


def llama3_json(reader: Reader, tools: ToolUse) -> Steps:
    """An answer that consists of calls, which semicolons separate; others are text."""
    yield from reader.skip_space_of_content()
    while (yield from reader.attempt(_tagged(reader, tools))):
        yield from reader.skip_space()
        if not (yield from reader.accept(";")):
            return
        yield from reader.skip_space()


def bare_json(reader: Reader, tools: ToolUse) -> Steps:
    """As of Llama 3, perhaps in a fence of Markdown."""
    yield from reader.skip_space_of_content()
    yield from reader.attempt(_fenced(reader, tools))
    if reader.calls:
        yield from reader.skip_space()
        yield from reader.accept(FENCE)


def json_calls(reader: Reader, known: Collection[str] | None = None) -> Steps:
    """One call, or an array of calls. Raises ``NotACallError`` for anything else."""
    if not (yield from reader.accept("[")):
        yield from json_call(reader, known)
        return
    yield from reader.skip_space()
    yield from json_call(reader, known)
    yield from reader.skip_space()
    while (yield from reader.accept(",")):
        yield from reader.skip_space()
        yield from json_call(reader, known)
        yield from reader.skip_space()
    yield from reader.accept("]")


def required_calls(reader: Reader, tools: ToolUse) -> Steps:
    """An output that a grammar constrains to an array of calls."""
    yield from reader.skip_space()
    steps = _forced_array(reader, tools) if tools.verbatim else json_calls(reader, tools.schemas)
    yield from reader.attempt(steps)


def named_call(reader: Reader, tools: ToolUse) -> Steps:
    """An output that a grammar constrains to the arguments of one function; none if it was cut off
    before them."""
    yield from reader.skip_space()
    if (yield from reader.at_end()):
        return
    reader.begin_call(tools.named)
    yield from reader.attempt(streamed_arguments(reader))


def forced_opening(name: str) -> str:
    """What comes before the arguments in an array of calls that a grammar demands."""
    return f'{{"name":{json.dumps(name)},"parameters":'


def text_opening(argument: str) -> str:
    """What comes before the text in arguments."""
    return f"{{{json.dumps(argument)}: {QUOTES}"


def verbatim_call(
    reader: Reader, tools: ToolUse, opening: Callable[[str], str] = forced_opening
) -> Generator[None, None, bool]:
    """Read a call whose only argument follows a grammar, up to the end of the output. Its text is
    written as it is, because a grammar cannot be followed inside a JSON string. Returns false if no
    such call begins here."""
    for name, argument in tools.verbatim.items():
        if (yield from reader.accept(opening(name) + text_opening(argument))):
            reader.begin_call(name)
            yield from verbatim_text(reader, argument)
            return True
    return False


def verbatim_text(reader: Reader, argument: str) -> Steps:
    """Read the text of the call that has begun, up to the end of the output."""
    reader.arguments(f'{{{json.dumps(argument)}:"')
    while not (yield from reader.at_end()):
        reader.arguments(escaped(reader.take(len(reader.held))))
    reader.arguments('"}')


def _forced_array(reader: Reader, tools: ToolUse) -> Steps:
    """An array whose last call may be a verbatim one, which has no end of its own."""
    yield from reader.expect("[")
    while not (yield from verbatim_call(reader, tools)):
        yield from json_call(reader, tools.schemas)
        if not (yield from reader.accept(",")):
            yield from reader.accept("]")
            return


def _after_marker(reader: Reader, end: str) -> Steps:
    yield from reader.skip_space()
    yield from json_calls(reader)
    yield from reader.skip_space()
    if end:
        yield from reader.accept(end)


def _tagged(reader: Reader, tools: ToolUse) -> Steps:
    if (yield from reader.accept(PYTHON_TAG)):
        yield from reader.skip_space()
    yield from json_calls(reader, tools.schemas)


def _fenced(reader: Reader, tools: ToolUse) -> Steps:
    if (yield from reader.accept(FENCE)):
        yield from reader.accept("json")
        yield from reader.skip_space()
    yield from json_calls(reader, tools.schemas)
