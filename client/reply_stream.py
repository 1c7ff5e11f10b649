"""A streamed reply as pieces of reasoning and text."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from .openai_server import OpenAIServer

# Tags around reasoning in the text of servers that do not separate it.
OPENING, CLOSING = "<think>", "</think>"

# Maximum length of a tool's result on the terminal.
MAX_RESULT = 400


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a reply; ``aside`` for reasoning and tool calls."""

    text: str
    aside: bool = False


@dataclass(slots=True)
class ReplyStats:
    """Tokens of a reply, and times in seconds since the request."""

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
    """One request, to the chat API if its body has messages. ``stats`` are complete once ``pieces``
    has ended."""

    def __init__(self, server: OpenAIServer, body: dict[str, Any]) -> None:
        self.stats = ReplyStats()
        self._server = server
        self._body = {**body, "stream_options": {"include_usage": True}}
        self._path = "chat/completions" if "messages" in body else "completions"
        self._tags = _ThinkTags(possible="messages" in body)

    def pieces(self) -> Generator[Piece, None, None]:
        """Send the request, and yield the reply. Raises ``ServerError``."""
        start = time.monotonic()
        try:
            for event in self._server.stream(self._path, self._body):
                self._count(event.get("usage"))
                for choice in _objects(event.get("choices")):
                    reason = choice.get("finish_reason")
                    self.stats.finish_reason = str(reason or self.stats.finish_reason)
                    delta = choice.get("delta") or {"content": choice.get("text")}
                    for piece in self._split(delta):
                        if self.stats.first is None:
                            self.stats.first = time.monotonic() - start
                        yield piece
            yield from self._tags.rest()
        finally:
            self.stats.seconds = time.monotonic() - start

    def _split(self, delta: Any) -> Iterator[Piece]:
        for fields in _objects([delta]):
            reasoning = fields.get("reasoning") or fields.get("reasoning_content")
            if isinstance(reasoning, str):
                yield Piece(reasoning, aside=True)
            for call in _objects(fields.get("tool_calls")):
                yield Piece(_tool_call_text(call), aside=True)
            for call in _objects(fields.get("mcp_calls")):
                yield Piece(_mcp_call_text(call), aside=True)
            if isinstance(fields.get("content"), str):
                yield from self._tags.split(fields["content"])

    def _count(self, usage: Any) -> None:
        for fields in _objects([usage]):
            self.stats.tokens = _number(fields.get("completion_tokens"))
            self.stats.prompt_tokens = _number(fields.get("prompt_tokens"))
            for details in _objects([fields.get("prompt_tokens_details")]):
                self.stats.cached_tokens = _number(details.get("cached_tokens"))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """The objects in a list, which may be missing, null or malformed."""
    return (
        (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())
    )


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _mcp_call_text(call: dict[str, Any]) -> str:
    """A tool call that the server has run, with its result."""
    result = call.get("output") or call.get("error") or ""
    name = f"{call.get('server_label', '')} {call.get('name', '')}".strip()
    return f"\n{name} {call.get('arguments', '')}: {str(result)[:MAX_RESULT]}\n"


def _tool_call_text(call: dict[str, Any]) -> str:
    """A piece of a tool call: first its name, then its arguments."""
    for function in _objects([call.get("function")]):
        name, arguments = function.get("name"), function.get("arguments")
        return (f"\n{name} " if name else "") + str(arguments or "")
    return ""


class _ThinkTags:
    """Separates reasoning between tags at the beginning of the text."""

    def __init__(self, *, possible: bool) -> None:
        self._uncertain = ""
        self._tag = OPENING if possible else ""
        self._after_reasoning = False

    def split(self, text: str) -> Iterator[Piece]:
        """Add text; yields the pieces that are certain."""
        self._uncertain += text
        if self._tag == OPENING:
            self._begin()
        if self._tag == CLOSING:
            yield from self._reasoning()
        if not self._tag:
            yield from self._text()

    def _begin(self) -> None:
        start = self._uncertain.lstrip()
        if start.startswith(OPENING):
            self._tag, self._uncertain = CLOSING, start.removeprefix(OPENING)
        elif not OPENING.startswith(start):
            self._tag = ""

    def _reasoning(self) -> Iterator[Piece]:
        thought, tag, rest = self._uncertain.partition(CLOSING)
        if tag:
            self._tag, self._uncertain, self._after_reasoning = "", rest, True
        else:
            cut = len(self._uncertain) - _overlap(self._uncertain, CLOSING)
            thought, self._uncertain = self._uncertain[:cut], self._uncertain[cut:]
        if thought:
            yield Piece(thought, aside=True)

    def _text(self) -> Iterator[Piece]:
        text = self._uncertain.lstrip("\n") if self._after_reasoning else self._uncertain
        self._uncertain = ""
        if text:
            self._after_reasoning = False
            yield Piece(text)

    def rest(self) -> Iterator[Piece]:
        """The uncertain text, at the end of the reply."""
        if self._uncertain:
            yield Piece(self._uncertain, aside=self._tag == CLOSING)
            self._uncertain = ""


def _overlap(text: str, tag: str) -> int:
    """The length of the longest suffix of ``text`` that is a prefix of ``tag``."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((n for n in lengths if tag.startswith(text[-n:])), 0)
