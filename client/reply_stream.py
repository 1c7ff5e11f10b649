"""A streamed answer as pieces of reasoning and text."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from .openai_server import OpenAIServer

# Servers that do not split reasoning off leave it between these.
OPENING, CLOSING = "<think>", "</think>"


# Characters of a tool's result that are shown.
MAX_RESULT = 400


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer, or of the reasoning or the tool call before it."""

    text: str
    aside: bool = False


@dataclass(slots=True)
class ReplyStats:
    """The times and tokens of one answer, in seconds since the request."""

    first: float | None = None
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    finish_reason: str = ""

    @property
    def rate(self) -> float:
        """Tokens a second after the first one."""
        rest = self.seconds - (self.first or 0.0)
        return (self.tokens - 1) / rest if self.tokens > 1 and rest > 0 else 0.0


class ReplyStream:
    """One request, of a chat if its body has messages; ``stats`` are complete when its pieces
    end."""

    def __init__(self, server: OpenAIServer, body: dict[str, Any]) -> None:
        self.stats = ReplyStats()
        self._server = server
        self._body = {**body, "stream_options": {"include_usage": True}}
        self._path = "chat/completions" if "messages" in body else "completions"
        self._tags = _ThinkTags(possible="messages" in body)

    def pieces(self) -> Generator[Piece, None, None]:
        """The answer. Raises ``ServerError``."""
        begun = time.monotonic()
        try:
            for event in self._server.stream(self._path, self._body):
                self._count(event.get("usage"))
                for choice in _objects(event.get("choices")):
                    reason = choice.get("finish_reason")
                    self.stats.finish_reason = str(reason or self.stats.finish_reason)
                    for piece in self._of(choice.get("delta") or {"content": choice.get("text")}):
                        if self.stats.first is None:
                            self.stats.first = time.monotonic() - begun
                        yield piece
            yield from self._tags.rest()
        finally:
            self.stats.seconds = time.monotonic() - begun

    def _of(self, delta: Any) -> Iterator[Piece]:
        for fields in _objects([delta]):
            reasoning = fields.get("reasoning") or fields.get("reasoning_content")
            if isinstance(reasoning, str):
                yield Piece(reasoning, aside=True)
            for call in _objects(fields.get("tool_calls")):
                yield Piece(_described(call), aside=True)
            for call in _objects(fields.get("mcp_calls")):
                yield Piece(_executed(call), aside=True)
            if isinstance(fields.get("content"), str):
                yield from self._tags.split(fields["content"])

    def _count(self, usage: Any) -> None:
        for fields in _objects([usage]):
            self.stats.tokens = _number(fields.get("completion_tokens"))
            self.stats.prompt_tokens = _number(fields.get("prompt_tokens"))
            for details in _objects([fields.get("prompt_tokens_details")]):
                self.stats.cached_tokens = _number(details.get("cached_tokens"))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """The objects of a list; servers leave out or null what they do not have."""
    return (
        (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())
    )


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _executed(call: dict[str, Any]) -> str:
    """A tool call that the server has run."""
    result = call.get("output") or call.get("error") or ""
    named = f"{call.get('server_label', '')} {call.get('name', '')}".strip()
    return f"\n{named} {call.get('arguments', '')}: {str(result)[:MAX_RESULT]}\n"


def _described(call: dict[str, Any]) -> str:
    """A piece of a tool call: its name once, then its arguments."""
    for function in _objects([call.get("function")]):
        name, arguments = function.get("name"), function.get("arguments")
        return (f"\n{name} " if name else "") + str(arguments or "")
    return ""


class _ThinkTags:
    """Splits reasoning off that is between tags at the beginning of the text."""

    def __init__(self, *, possible: bool) -> None:
        self._held = ""
        self._tag = OPENING if possible else ""
        self._after_reasoning = False

    def split(self, text: str) -> Iterator[Piece]:
        """The pieces that are certain by now."""
        self._held += text
        if self._tag == OPENING:
            self._begin()
        if self._tag == CLOSING:
            yield from self._reasoning()
        if not self._tag:
            yield from self._text()

    def _begin(self) -> None:
        start = self._held.lstrip()
        if start.startswith(OPENING):
            self._tag, self._held = CLOSING, start.removeprefix(OPENING)
        elif not OPENING.startswith(start):
            self._tag = ""

    def _reasoning(self) -> Iterator[Piece]:
        thought, found, answer = self._held.partition(CLOSING)
        if found:
            self._tag, self._held, self._after_reasoning = "", answer, True
        else:
            cut = len(self._held) - _overlap(self._held, CLOSING)
            thought, self._held = self._held[:cut], self._held[cut:]
        if thought:
            yield Piece(thought, aside=True)

    def _text(self) -> Iterator[Piece]:
        text = self._held.lstrip("\n") if self._after_reasoning else self._held
        self._held = ""
        if text:
            self._after_reasoning = False
            yield Piece(text)

    def rest(self) -> Iterator[Piece]:
        """What was held back when the answer ends."""
        if self._held:
            yield Piece(self._held, aside=self._tag == CLOSING)
            self._held = ""


def _overlap(text: str, tag: str) -> int:
    """The length of the longest end of ``text`` with which ``tag`` begins."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((n for n in lengths if tag.startswith(text[-n:])), 0)
