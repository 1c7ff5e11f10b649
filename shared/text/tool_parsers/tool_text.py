"""The stage that finds tool calls in the content of a choice."""

from __future__ import annotations

from ..output import Deltas
from .formats import format_of
from .reader import Reader
from .tool_use import ToolUse


class ToolText:
    """Runs the parser of one choice over its content. What follows the parser's end is content."""

    def __init__(self, tools: ToolUse) -> None:
        self._reader = Reader(parallel=tools.parallel)
        self._steps = format_of(tools).parse(self._reader, tools)

    @property
    def reasoning(self) -> bool:
        return self._reader.thinking

    def push(self, text: str) -> Deltas:
        self._reader.held += text
        self._run()
        return self._reader.take_found()

    def flush(self) -> Deltas:
        self._reader.ended = True
        self._run()
        self._reader.end()
        return self._reader.take_found()

    def _run(self) -> None:
        """Advance the parser as far as the text goes."""
        if next(self._steps, self) is self:
            self._reader.content(self._reader.take(len(self._reader.held)))
