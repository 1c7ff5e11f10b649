"""The parser of a choice: its reasoning is split off first, then calls are found in the rest."""

from __future__ import annotations

from collections.abc import Iterable

from .output import Deltas, OutputParser, TextDelta
from .reasoning import HARMONY, reasoning_markers, reasoning_parser
from .tool_parsers.formats import format_of
from .tool_parsers.tool_text import ToolText
from .tool_parsers.tool_use import ToolUse

HARMONY_TOOLS = "openai"
_WITHOUT_TOOLS = ToolUse(parser=HARMONY_TOOLS, schemas={})


def output_parser(
    reasoning: str, tools: ToolUse | None, *, opened: bool | None = None
) -> OutputParser | None:
    """A new parser for one choice; ``None`` if all text is content. ``opened`` says whether the
    prompt ends inside the reasoning, if it is known."""
    if reasoning == HARMONY and tools is None:
        tools = _WITHOUT_TOOLS
    parser = reasoning_parser(reasoning, opened=opened)
    if tools is None:
        return parser
    calls = ToolText(tools)
    return calls if parser is None else _ReasoningAndCalls(parser, calls)


def kept_tokens(reasoning: str, tools: ToolUse | None) -> tuple[str, ...]:
    """The special tokens that the parser needs as text."""
    if reasoning == HARMONY and tools is None:
        tools = _WITHOUT_TOOLS
    kept = () if tools is None else format_of(tools).kept
    return (*kept, *reasoning_markers(reasoning))


class _ReasoningAndCalls:
    def __init__(self, reasoning: OutputParser, calls: ToolText) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def reasoning(self) -> bool:
        return self._reasoning.reasoning

    def push(self, text: str) -> Deltas:
        return list(self._parsed(self._reasoning.push(text)))

    def flush(self) -> Deltas:
        return [*self._parsed(self._reasoning.flush()), *self._calls.flush()]

    def _parsed(self, deltas: Deltas) -> Iterable[TextDelta]:
        for delta in deltas:
            if delta.reasoning:
                yield TextDelta(reasoning=delta.reasoning)
            if delta.content:
                yield from self._calls.push(delta.content)
