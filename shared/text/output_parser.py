"""The parser of a choice: splits off the reasoning first, then finds tool calls in the rest."""

from __future__ import annotations

from collections.abc import Iterable

from .detokenize import TokenTexts
from .markers import NO_CALLS, CallMarkers
from .output import Deltas, OutputParser, TextDelta
from .reasoning import HARMONY, ReasoningParser, reasoning_markers, reasoning_parser
from .tool_parsers.formats import format_of
from .tool_parsers.tool_text import ToolText
from .tool_parsers.tool_use import ToolUse

HARMONY_TOOLS = "openai"
_WITHOUT_TOOLS = ToolUse(parser=HARMONY_TOOLS, schemas={})


def output_parser(
    reasoning: str,
    tools: ToolUse | None,
    *,
    opened: bool | None = None,
    calls: CallMarkers | None = None,
) -> OutputParser | None:
    """A new parser for one choice; ``None`` if all text is content. ``opened`` says whether the
    prompt ends inside the reasoning, ``None`` if unknown. ``calls`` are the call markers among the
    tokens of the choice; without it, every marker in the text counts."""
    if reasoning == HARMONY and tools is None:
        tools = _WITHOUT_TOOLS
    if tools is None:
        return reasoning_parser(reasoning, opened=opened)
    calls = CallMarkers(format_of(tools).starts) if calls is None else calls
    parser = reasoning_parser(reasoning, opened=opened, calls=calls)
    if parser is None:
        return ToolText(tools)
    return _ReasoningAndCalls(parser, ToolText(tools, stray=parser.end))


def call_markers(tools: ToolUse | None, texts: TokenTexts) -> CallMarkers:
    """The markers that begin a tool call, for one choice."""
    if tools is None:
        return NO_CALLS
    starts = format_of(tools).starts
    return CallMarkers(starts, texts.added_tokens(starts))


def marker_tokens(reasoning: str, tools: ToolUse | None) -> tuple[str, ...]:
    """The special tokens that the parser needs as text."""
    if reasoning == HARMONY and tools is None:
        tools = _WITHOUT_TOOLS
    markers = () if tools is None else format_of(tools).markers
    return (*markers, *reasoning_markers(reasoning))


class _ReasoningAndCalls:
    """Splits off reasoning, which a call may end, but which does not begin in one."""

    def __init__(self, reasoning: ReasoningParser, calls: ToolText) -> None:
        self._reasoning = reasoning
        self._reasoning.may_begin = lambda: not calls.in_call
        self._calls = calls

    @property
    def reasoning(self) -> bool:
        return self._reasoning.reasoning

    def push(self, text: str) -> Deltas:
        return list(self._parse(self._reasoning.pieces(text)))

    def flush(self, ended_by: str = "") -> Deltas:
        return [*self._parse(self._reasoning.flush()), *self._calls.flush(ended_by)]

    def _parse(self, deltas: Iterable[TextDelta]) -> Iterable[TextDelta]:
        for delta in deltas:
            if delta.reasoning:
                yield TextDelta(reasoning=delta.reasoning)
            if delta.content:
                yield from self._calls.push(delta.content)
