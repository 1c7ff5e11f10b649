"""Responses and errors in Ollama's shape: one object, or a line of JSON for each piece."""

from __future__ import annotations

import time
from array import array
from datetime import UTC, datetime
from typing import Any

from ...shared.text.output import CallDelta
from ..errors import ApiError
from ..generation import ChoiceDelta, new_tokens
from ..http.encoding import EncodedArray, dump
from ..http.text_template import StampedTemplates
from ..openai.chat_formatter import EncodedEntries, TokenEntries
from ..openai.response_fields import token_names
from ..requests.call_arguments import read_arguments
from ..result import GenerationResult
from ..surface import ResponseFormatter
from ..usage import Usage
from .request import OllamaRequest, OnlyLoadsError


class OllamaErrors:
    """Errors in Ollama's shape, which has only a message."""

    def error_body(self, error: ApiError) -> Any:
        return {"error": error.message}

    def error_event(self, error: ApiError) -> bytes:
        return dump(self.error_body(error)) + b"\n"


class OllamaFormatter(ResponseFormatter):
    """Formats one response to /api/chat, or to /api/generate unless ``chat``."""

    def __init__(self, request: OllamaRequest, *, chat: bool) -> None:
        self._request = request
        self._chat = chat
        self._start = time.monotonic_ns()
        self._first: int | None = None
        self._reason = "stop"
        self._calls: dict[int, _StreamedCall] = {}
        texts = token_names(request)
        self._entries = TokenEntries(request.model.tokenizer, texts)
        self._tokens = new_tokens()  # of a streamed response that returns its context
        self._lines = StampedTemplates(self._text_line)

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """A line for new text. Tool calls are written whole, at the end."""
        if self._first is None:
            self._first = time.monotonic_ns()
        if self._request.returns_context:
            self._tokens.extend(delta.tokens)
        reasoning = delta.reasoning if self._request.include_reasoning else ""
        lines = b""
        if delta.scored or (delta.text and reasoning):
            lines += self._line(self._content(delta.text, reasoning) | self._logprobs(delta))
        elif delta.text or reasoning:
            lines += self._lines.fill(not delta.text, _stamp(), delta.text or reasoning)
        for call in delta.calls:
            self._calls.setdefault(call.index, _StreamedCall()).add(call)
        if delta.finish_reason is not None:
            self._reason = _done_reason(delta.finish_reason)
            if self._calls:
                calls = [call.body() for call in self._calls.values()]
                lines += self._line(self._content("", "", calls))
        return lines

    def closing(self, usage: Usage) -> bytes:
        end = self._end(usage, self._reason)
        if self._request.returns_context:
            end["context"] = self._context(self._tokens)
        content = {**self._content("", ""), **end}
        return self._line(content, done=True)

    def choice_logprobs(self) -> OllamaLogprobs | None:
        return OllamaLogprobs(self._entries) if self._request.logprobs is not None else None

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        (choice,) = result.choices
        reasoning = choice.reasoning.getvalue() if self._request.include_reasoning else ""
        calls = [_call(call.name, call.arguments.getvalue()) for call in choice.calls]
        content = self._content(choice.text, reasoning, calls)
        end = self._end(result.usage, _done_reason(choice.finish_reason))
        if self._request.returns_context:
            end["context"] = self._context(choice.tokens)
        if choice.logprobs is not None:
            content["logprobs"] = choice.logprobs.body()
        return self._body(content, done=True, created_at=_timestamp()) | end

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any]:
        if not delta.scored:
            return {}
        return {"logprobs": [self._entries.scored(item) for item in delta.scored]}

    def _context(self, tokens: array[int]) -> array[int]:
        """The tokens of prompt and output, with which the next request may begin."""
        (prompt,) = self._request.prompts
        return prompt.tokens + tokens

    def _content(
        self, text: Any, reasoning: str, calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        extra: dict[str, Any] = {"thinking": reasoning} if reasoning else {}
        if not self._chat:
            return {"response": text, **extra}
        if calls:
            extra["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": text, **extra}}

    def _body(self, content: dict[str, Any], *, done: bool, created_at: str) -> dict[str, Any]:
        head = {"model": self._request.requested_model, "created_at": created_at}
        return {**head, **content, "done": done}

    def _line(self, content: dict[str, Any], *, done: bool = False) -> bytes:
        return dump(self._body(content, done=done, created_at=_timestamp())) + b"\n"

    def _text_line(self, thinking: bool, created_at: str, text: str) -> bytes:
        """A line of text or reasoning alone."""
        content = self._content("", text) if thinking else self._content(text, "")
        return dump(self._body(content, done=False, created_at=created_at)) + b"\n"

    def _end(self, usage: Usage, reason: str) -> dict[str, Any]:
        """Counts, and durations in nanoseconds. Without streaming, the whole duration counts as
        generation."""
        now = time.monotonic_ns()
        first = self._first or self._start
        return {
            "done_reason": reason,
            "total_duration": now - self._start,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first - self._start,
            "eval_count": usage.completion_tokens,
            "eval_duration": now - first,
        }


class OllamaLogprobs(EncodedEntries):
    """The logprobs of a response: an entry for each token."""

    def body(self) -> EncodedArray:
        return self.content


def load_response(error: OnlyLoadsError) -> dict[str, Any]:
    """The response to a request without a prompt: the model is always loaded."""
    head = {"model": error.requested_model, "created_at": _timestamp()}
    return {**head, **error.content, "done": True, "done_reason": "load"}


class _StreamedCall:
    """The collected parts of one streamed tool call."""

    def __init__(self) -> None:
        self._name = ""
        self._arguments: list[str] = []

    def add(self, delta: CallDelta) -> None:
        self._name = self._name or delta.name
        self._arguments.append(delta.arguments)

    def body(self) -> dict[str, Any]:
        return _call(self._name, "".join(self._arguments))


def _call(name: str, arguments: str) -> dict[str, Any]:
    """A tool call. Arguments that were cut off are not valid JSON and are left out."""
    return {"function": {"name": name, "arguments": read_arguments(arguments)}}


def _timestamp() -> str:
    """The current time in Ollama's format."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _stamp() -> bytes:
    """The current time as JSON."""
    return b'"%b"' % _timestamp().encode()


def _done_reason(finish_reason: str | None) -> str:
    return "length" if finish_reason == "length" else "stop"
