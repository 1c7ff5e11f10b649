"""The stage that finds tool calls in the content of a choice."""

from __future__ import annotations

from ..output import Deltas
from .formats import ToolFormat, format_of
from .reader import Reader, Steps
from .tool_use import ToolUse

# Text is parsed in pieces, since reading a marker takes time in proportion to the buffer.
PIECE = 1024


class ToolText:
    """Runs the parser of one choice over its content. Text after the parser's end is content,
    except for a ``stray`` marker after a call."""

    def __init__(self, tools: ToolUse, *, stray: str = "") -> None:
        self._reader = Reader(parallel=tools.parallel, stray=stray)
        self._markers = format_of(tools).markers
        self._steps = _all(format_of(tools), self._reader, tools)

    @property
    def reasoning(self) -> bool:
        return self._reader.thinking

    @property
    def in_call(self) -> bool:
        """True from the first call on, and while text may be a call."""
        return self._reader.in_call

    def push(self, text: str) -> Deltas:
        for at in range(0, len(text), PIECE):
            self._reader.buffer += text[at : at + PIECE]
            next(self._steps, None)
        return self._reader.take_deltas()

    def flush(self, ended_by: str = "") -> Deltas:
        """Return the rest. A marker that ended the choice belongs to its last call."""
        reader = self._reader
        is_marker = ended_by in self._markers and reader.calls > 0 and not reader.verbatim
        deltas = self.push(ended_by) if is_marker else ()
        self._reader.ended = True
        next(self._steps, None)
        self._reader.end()
        return [*deltas, *self._reader.take_deltas()]


def _all(form: ToolFormat, reader: Reader, tools: ToolUse) -> Steps:
    yield from form.parse(reader, tools)
    yield from reader.content_until()
