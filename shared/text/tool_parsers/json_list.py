"""Calls as JSON, single or in an array: Phi-4-mini, Granite 3, Llama 3, and models that write plain
JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from .json_call import json_call, stream_arguments
from .reader import Reader, Steps
from .tool_use import ToolUse

PYTHON_TAG = "<|python_tag|>"
FENCE = "```"
PHI4 = "functools"
GRANITE = ("<|tool_call|>", "<tool_call>")
GRANITE_END = "</tool_call>"
GRANITE_20B = "<function_call>"


def calls_after(*markers: str, end: str = "") -> Callable[[Reader, ToolUse], Steps]:
    """A parser of calls after one of ``markers``; text may precede it."""
    ends = (end,) if end else ()

    def parse(reader: Reader, tools: ToolUse) -> Steps:
        def call(_: list[str]) -> Steps:
            yield from json_calls(reader, tools, ends=(*markers, *ends))
            yield from reader.skip("}", "]")
            if end:
                yield from reader.accept(end)

        yield from reader.marked_calls(call, markers, ends)

    return parse


def phi4(reader: Reader, tools: ToolUse) -> Steps:
    """Calls after a word that may also occur in text."""

    def call(_: list[str]) -> Steps:
        yield from json_calls(reader, tools)
        yield from reader.skip("}", "]")

    yield from reader.marked_calls(call, (PHI4,))


def llama3_json(reader: Reader, tools: ToolUse) -> Steps:
    """An output that consists of calls, separated by semicolons; anything else is text."""
    yield from reader.skip_space_of_content()
    while (yield from reader.attempt(_tagged(reader, tools))):
        yield from reader.skip("}", "]")
        if not (yield from reader.accept(";")):
            return
        yield from reader.skip_space()


def bare_json(reader: Reader, tools: ToolUse) -> Steps:
    """Like ``llama3_json``, possibly in a Markdown fence."""
    yield from reader.skip_space_of_content()
    yield from reader.attempt(_fenced(reader, tools))
    if reader.calls:
        yield from reader.skip("}", "]")
        yield from reader.accept(FENCE)


def json_calls(
    reader: Reader, tools: ToolUse, *, ends: tuple[str, ...] = (), known: bool = False
) -> Steps:
    """One call, or an array of calls, up to one of ``ends`` at the latest. Raises
    ``NotACallError`` for anything else."""
    if not (yield from reader.accept("[")):
        yield from json_call(reader, tools, ends=ends, known=known)
        return
    more = True
    while more:
        yield from reader.skip_space()
        yield from json_call(reader, tools, ends=ends, known=known)
        yield from reader.skip("}")
        more = (yield from reader.accept(",")) or bool((yield from reader.next_is("{")))
    yield from reader.accept("]")


def required_calls(reader: Reader, tools: ToolUse) -> Steps:
    """An output that a grammar constrains to an array of calls."""
    yield from reader.skip_space()
    yield from reader.attempt(json_calls(reader, tools, known=True))


def named_call(reader: Reader, tools: ToolUse) -> Steps:
    """An output that a grammar constrains to the arguments of one function; no call if it was cut
    off before them."""
    yield from reader.skip_space()
    if (yield from reader.at_end()):
        return
    reader.begin_call(tools.named)
    yield from stream_arguments(reader)


def forced_opening(name: str) -> str:
    """The text before the arguments in an array of calls that a grammar requires."""
    return f'{{"name":{json.dumps(name)},"parameters":'


def _tagged(reader: Reader, tools: ToolUse) -> Steps:
    yield from reader.skip(PYTHON_TAG)
    yield from json_calls(reader, tools, known=True)


def _fenced(reader: Reader, tools: ToolUse) -> Steps:
    if (yield from reader.accept(FENCE)):
        yield from reader.accept("json")
        yield from reader.skip_space()
    yield from json_calls(reader, tools, known=True)
