"""Reasoning parsers: text between markers goes to the response's reasoning, the rest to content."""

from __future__ import annotations

from dataclasses import dataclass

from .output import Deltas, OutputParser, TextDelta


@dataclass(frozen=True, slots=True)
class Markers:
    """Delimiters of the reasoning. ``opened`` is true for models whose prompt ends inside it; they
    may repeat the opening marker."""

    start: str
    end: str
    opened: bool


# By the names that vLLM's --reasoning-parser has for them.
NO_PARSER = "none"
PARSERS = {
    "qwen3": Markers("<think>", "</think>", opened=False),
    "deepseek_r1": Markers("<think>", "</think>", opened=True),
}


def reasoning_parser(name: str) -> OutputParser | None:
    """A new parser for one choice; ``None`` for ``NO_PARSER``."""
    return None if name == NO_PARSER else ReasoningParser(PARSERS[name])


class ReasoningParser:
    """Splits text at the first pair of markers, which belong to neither part."""

    def __init__(self, markers: Markers) -> None:
        self._start, self._end = markers.start, markers.end
        self.reasoning = markers.opened
        self._may_repeat_start = markers.opened
        self._over = False  # the reasoning has ended: all further text is content
        self._held = ""

    def push(self, text: str) -> Deltas:
        self._held += text
        if self._may_repeat_start and not self._skip_start():
            return ()
        content, reasoning = "", ""
        while not self._over:
            marker = self._end if self.reasoning else self._start
            before, found, after = self._held.partition(marker)
            kept = "" if found else _beginning_of(marker, before)
            shown = before.removesuffix(kept)
            if self.reasoning:
                reasoning += shown
            else:
                content += shown
            self._held = after if found else kept
            if not found:
                return (TextDelta(content, reasoning),)
            self._over, self.reasoning = self.reasoning, not self.reasoning
        content, self._held = content + self._held, ""
        return (TextDelta(content, reasoning),)

    def flush(self) -> Deltas:
        held, self._held = self._held, ""
        return (TextDelta(reasoning=held) if self.reasoning else TextDelta(held),)

    def _skip_start(self) -> bool:
        """Drop a repeated opening marker. Returns whether enough text is there to know."""
        if len(self._held) < len(self._start) and self._start.startswith(self._held):
            return False
        self._may_repeat_start = False
        self._held = self._held.removeprefix(self._start)
        return True


def _beginning_of(marker: str, text: str) -> str:
    """The longest end of ``text`` with which ``marker`` begins."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return marker[:length]
    return ""
