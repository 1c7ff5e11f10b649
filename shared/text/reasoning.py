"""Reasoning parsers: text between markers becomes reasoning, the rest content."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .markers import NO_CALLS, CallMarkers, first_of, partial_marker
from .output import Deltas, TextDelta


@dataclass(frozen=True, slots=True)
class Markers:
    """Delimiters of the reasoning. ``opened`` is true for models whose prompt ends inside the
    reasoning; they may repeat the opening marker."""

    start: str
    end: str
    opened: bool


# The names are those of vLLM's --reasoning-parser.
NO_PARSER = "none"
HARMONY = "openai_gptoss"  # split by the tool parser
_THINK = Markers("<think>", "</think>", opened=False)
_OPENED = Markers("<think>", "</think>", opened=True)
_ANALYSIS = Markers("<|channel|>analysis<|message|>", "<|end|>", opened=False)
PARSERS = {
    "deepseek_r1": _OPENED,
    "deepseek_v3": _THINK,
    "ernie45": _OPENED,
    "gemma4": Markers("<|channel>thought\n", "<channel|>", opened=False),
    "glm45": _THINK,
    "granite": Markers("Here is my thought process:", "Here is my response:", opened=False),
    "holo2": _THINK,
    "hunyuan_a13b": _THINK,
    "kimi_k2": _THINK,
    "minimax_m2": _OPENED,
    "mistral": Markers("[THINK]", "[/THINK]", opened=False),
    "olmo3": _OPENED,
    "qwen3": _THINK,
    "seed_oss": Markers("<seed:think>", "</seed:think>", opened=False),
    "step3": _OPENED,
}


def reasoning_parser(
    name: str, *, opened: bool | None = None, calls: CallMarkers = NO_CALLS
) -> ReasoningParser | None:
    """A new parser for one choice; ``None`` if all its text is content. ``opened`` says whether the
    prompt ends inside the reasoning, ``None`` if unknown. ``calls`` end it too."""
    if name in (NO_PARSER, HARMONY):
        return None
    markers = PARSERS[name]
    return ReasoningParser(markers if opened is None else replace(markers, opened=opened), calls)


def section_markers(name: str, *, opened: bool | None = None) -> Markers | None:
    """The delimiters of an output's reasoning; ``None`` if it has none. ``opened`` says whether the
    prompt ends inside it, ``None`` if unknown."""
    if name == NO_PARSER:
        return None
    markers = _ANALYSIS if name == HARMONY else PARSERS[name]
    return markers if opened is None else replace(markers, opened=opened)


def reasoning_markers(name: str) -> tuple[str, ...]:
    """The delimiters of a parser's reasoning."""
    markers = PARSERS.get(name)
    return () if markers is None else (markers.start.strip(), markers.end)


def opened_by(name: str, prompt: str) -> bool | None:
    """True if the end of a prompt opens the reasoning, false if it closes it, else ``None``."""
    markers = PARSERS.get(name)
    if markers is None:
        return None
    end = prompt.rstrip()
    if end.endswith(markers.start.rstrip()):
        return True
    return False if end.endswith(markers.end) else None


class ReasoningParser:
    """Splits text at the first pair of markers, which are dropped. A call also ends the reasoning,
    before its marker: models forget ``end``, or write it after the call.

    ``may_begin`` returns whether reasoning may begin here. It is called after all text before the
    marker has been consumed."""

    def __init__(self, markers: Markers, calls: CallMarkers = NO_CALLS) -> None:
        self._start, self.end = markers.start, markers.end
        self._calls = calls
        self.may_begin: Callable[[], bool] = lambda: True
        self.reasoning = markers.opened
        self._may_repeat_start = markers.opened
        self._over = False  # the reasoning has ended: all further text is content
        self._buffer = ""
        self._length = 0  # of all text

    def push(self, text: str) -> Deltas:
        deltas = list(self.pieces(text))
        content = "".join([delta.content for delta in deltas])
        reasoning = "".join([delta.reasoning for delta in deltas])
        return (TextDelta(content, reasoning),)

    def pieces(self, text: str) -> Iterator[TextDelta]:
        """Add text; yield its parts in order."""
        self._buffer += text
        self._length += len(text)
        if self._may_repeat_start and not self._skip_start():
            return
        while not self._over:
            markers = (self.end, *self._calls.texts) if self.reasoning else (self._start,)
            match = self._next(markers)
            partial = partial_marker(self._buffer, markers)
            text_before = self._buffer[: len(self._buffer) - partial if match is None else match[0]]
            if text_before:
                yield TextDelta(reasoning=text_before) if self.reasoning else TextDelta(text_before)
            self._buffer = self._buffer[len(text_before) :]
            if match is None:
                return
            self._pass(match[1])
        rest, self._buffer = self._buffer, ""
        if rest:
            yield TextDelta(rest)

    def flush(self, ended_by: str = "") -> Deltas:
        rest, self._buffer = self._buffer, ""
        return (TextDelta(reasoning=rest) if self.reasoning else TextDelta(rest),)

    def _next(self, markers: tuple[str, ...]) -> tuple[int, str] | None:
        """The next marker in the buffer, with its place."""
        at = 0
        while (match := first_of(self._buffer, markers, at)) is not None:
            place, marker = match
            position = self._length - len(self._buffer) + place
            if marker not in self._calls.texts or self._calls.begins_call(position):
                return match
            at = place + 1
        return None

    def _pass(self, marker: str) -> None:
        """Go past a marker, unless it is content."""
        is_content = marker in self._calls.texts
        if self.reasoning:
            self._over = True
        elif not self.may_begin():
            self._over = is_content = True
        self.reasoning = not self._over
        if not is_content:
            self._buffer = self._buffer[len(marker) :]

    def _skip_start(self) -> bool:
        """Drop a repeated opening marker. Returns false if more text is needed to tell."""
        if len(self._buffer) < len(self._start) and self._start.startswith(self._buffer):
            return False
        self._may_repeat_start = False
        self._buffer = self._buffer.removeprefix(self._start)
        return True
