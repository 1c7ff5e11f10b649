"""Reasoning parsers: text between markers goes to the response's reasoning, the rest to content."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
HARMONY = "openai_gptoss"  # which the parser of calls splits too
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


def reasoning_parser(name: str, *, opened: bool | None = None) -> OutputParser | None:
    """A new parser for one choice; ``None`` if all its text is content. ``opened`` says whether the
    prompt ends inside the reasoning, if it is known."""
    if name in (NO_PARSER, HARMONY):
        return None
    markers = PARSERS[name]
    return ReasoningParser(markers if opened is None else replace(markers, opened=opened))


def section_markers(name: str, *, opened: bool | None = None) -> Markers | None:
    """The delimiters of an output's reasoning; ``None`` if it has none. ``opened`` says whether the
    prompt ends inside it, if it is known."""
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
