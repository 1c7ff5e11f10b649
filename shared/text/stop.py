"""Stop strings, matched across token and chunk boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton: ``matched`` characters end the text."""

    text: str
    fallback: list[int]
    matched: int = 0

    def push(self, character: str) -> bool:
        """Advance by one character. Return whether the whole string has just ended."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self.fallback[self.matched - 1]
        if self.text[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.text)


class StopStrings:
    """Stop strings compiled once for all choices of a request; matchers only keep state."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._compiled = [(stop, _fallback(stop)) for stop in stops if stop]

    def patterns(self) -> list[_Pattern]:
        return [_Pattern(text, fallback) for text, fallback in self._compiled]


class StopMatcher:
    """Passes text until a stop string ends, holding back only a possible beginning of one.

    The stop string that ends first wins, and among those that end together the longest, so the
    result does not depend on how the text is split into deltas. After a match, nothing passes.
    """

    def __init__(self, stops: Sequence[str] | StopStrings, *, include: bool = False) -> None:
        compiled = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._patterns = compiled.patterns()
        self._include = include
        self._held = ""
        self.matched: str | None = None

    @property
    def passes_all(self) -> bool:
        """True if there are no stop strings."""
        return not self._patterns

    def push(self, text: str) -> str:
        """Add generated text; return the part that may be shown. Check ``matched`` afterwards."""
        if not self._patterns:
            return text
        if self.matched is not None:
            return ""
        for position, character in enumerate(text):
            ended = [p for p in self._patterns if p.push(character)]
            if ended:
                return self._end(text[: position + 1], max(ended, key=lambda p: len(p.text)).text)
        held = max(pattern.matched for pattern in self._patterns)
        pending = self._held + text
        cut = len(pending) - held
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """Return the text held back, at the end of the generation."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, stop: str) -> str:
        self.matched = stop
        shown = self._held + text
        self._held = ""
        return shown if self._include else shown[: len(shown) - len(stop)]


def _fallback(text: str) -> list[int]:
    """For each prefix of ``text``, the length of its longest proper prefix that is its suffix."""
    table = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = table[length - 1]
        if text[i] == text[length]:
            length += 1
        table[i] = length
    return table
