"""Chat completions in OpenAI's shape, whole and as chunks of a stream."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from io import StringIO
from typing import Any

from ...shared.text.output import CallDelta
from ...shared.text.reasoning import NO_PARSER
from ...shared.text.tokenizer import Tokenizer
from ..generation import ChoiceDelta, ScoredToken
from ..http.encoding import EncodedArray, data_event
from ..http.text_template import TextTemplates
from ..node_streams.logprobs import alternatives
from ..result import ChoiceResult, GenerationResult, ToolCallResult
from ..surface import ResponseFormatter
from ..usage import Usage
from .chat_request import ChatRequest
from .response_fields import (
    END_OF_STREAM,
    ContinuousUsage,
    PromptLogprobsEncoder,
    error_field,
    fingerprint_field,
    finite,
    metrics_body,
    placement_body,
    token_names,
    usage_body,
)


class TokenEntries:
    """Formats tokens with their logprobs."""

    def __init__(self, tokenizer: Tokenizer, name_of: Callable[[int], str]) -> None:
        self._bytes_of = tokenizer.texts.bytes_of
        self._name_of = name_of

    def scored(self, item: ScoredToken) -> dict[str, Any]:
        logprobs = item.logprobs
        if logprobs is None:  # only the first token of an echoed prompt has none
            return self._entry(item.token, 0.0) | {"top_logprobs": []}
        top = [self._entry(*entry) for entry in alternatives(logprobs)]
        chosen = logprobs.chosen
        return self._entry(chosen.token, chosen.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name_of(token),
            "logprob": finite(logprob),
            "bytes": list(self._bytes_of(token)),
        }


class EncodedEntries:
    """A choice's token entries, encoded as they arrive."""

    def __init__(self, entries: TokenEntries) -> None:
        self._entries = entries
        self.content = EncodedArray()

    def __len__(self) -> int:
        return len(self.content)

    def add(self, items: Collection[ScoredToken]) -> None:
        self.content.extend(map(self._entries.scored, items))


class ChatLogprobsEncoder(EncodedEntries):
    """The logprobs of a choice: an entry for each token."""

    def body(self) -> dict[str, Any]:
        return {"content": self.content, "refusal": None}


class ChatFormatter(ResponseFormatter):
    """Formats one response; ``created`` is its Unix time."""

    def __init__(self, request: ChatRequest, created: int) -> None:
        self._request = request
        self._tokenizer = request.model.tokenizer
        self._entries = TokenEntries(self._tokenizer, token_names(request))
        self._continuous = ContinuousUsage(request) if request.continuous_usage else None
        self._created = created
        self._parsed = request.text.reasoning_parser != NO_PARSER
        self._texts = TextTemplates(self._text_event)
        self._reasonings = TextTemplates(self._reasoning_event)
        # Whether text events carry further fields.
        self._varied = request.continuous_usage or request.return_token_ids

    def opening(self) -> bytes:
        """The role chunk of each choice, with the opening text that is not generated."""
        role = {"role": self._request.role, "content": self._request.opening_text}
        chunks = [self._chunk([stream_choice(i, role)]) for i in range(self._request.choices)]
        if self._request.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._request.prompts[0].tokens
        if self._request.prompt_text is not None:
            chunks[0]["prompt_text"] = self._request.prompt_text
        return b"".join(map(data_event, chunks))

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """Chunks for reasoning, text and tool calls, then the finish reason with an empty delta, as
        in OpenAI's API. Logprobs of tokens without text, such as the one that ended the choice,
        come in the last chunk."""
        if self._continuous:
            self._continuous.add(delta)
        events = b""
        if delta.reasoning and self._request.include_reasoning:
            events += self._reasoning(delta.index, delta.reasoning)
        ended = delta.finish_reason is not None and not delta.text
        if delta.text and not (delta.scored or self._varied):
            events += self._texts.fill(delta.index, delta.text)
        elif delta.text or (not ended and self._has_tokens(delta)):
            choice = stream_choice(delta.index, {"content": delta.text}) | self._tokens(delta)
            events += data_event(self._chunk([choice]))
        for call in delta.calls:
            choice = stream_choice(delta.index, self._call_delta(call))
            events += data_event(self._chunk([choice]))
        if delta.finish_reason is not None:
            choice = stream_choice(delta.index, {}, self._finish_reason(delta.finish_reason))
            choice["stop_reason"] = delta.stop_reason
            choice |= error_field(delta.error)
            if ended and self._has_tokens(delta):
                choice |= self._tokens(delta)
            events += data_event(self._chunk([choice]) | fingerprint_field(self._request))
        return events

    def _has_tokens(self, delta: ChoiceDelta) -> bool:
        return bool(delta.scored or (delta.tokens and self._request.return_token_ids))

    def _tokens(self, delta: ChoiceDelta) -> dict[str, Any]:
        """The fields of a chunk about the tokens of a delta."""
        fields: dict[str, Any] = {}
        if delta.scored:
            fields["logprobs"] = self._logprobs(delta.scored)
        if self._request.return_token_ids:
            fields["token_ids"] = list(delta.tokens)
        return fields

    def _text_event(self, index: int, text: str) -> bytes:
        return data_event(self._chunk([stream_choice(index, {"content": text})]))

    def _reasoning_event(self, index: int, text: str) -> bytes:
        return data_event(self._chunk([stream_choice(index, _reasoning(text))]))

    def _reasoning(self, index: int, text: str) -> bytes:
        varied = self._continuous is not None
        return (self._reasoning_event if varied else self._reasonings.fill)(index, text)

    def closing(self, usage: Usage) -> bytes:
        """The usage chunk that ``include_usage`` requests."""
        if not self._request.include_usage:
            return b""
        extra = {"usage": self._usage(usage), "tandem": placement_body(usage)}
        extra |= fingerprint_field(self._request) | metrics_body(self._request, usage)
        return data_event(self._chunk([]) | extra)

    def end_of_stream(self) -> bytes:
        return END_OF_STREAM

    def choice_logprobs(self) -> ChatLogprobsEncoder | None:
        return None if self._request.logprobs is None else ChatLogprobsEncoder(self._entries)

    def prompt_logprobs(self) -> PromptLogprobsEncoder | None:
        if self._request.prompt_logprobs is None:
            return None
        return PromptLogprobsEncoder(self._tokenizer)

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        body = self._head("chat.completion") | {
            "choices": [self._whole(i, choice) for i, choice in enumerate(result.choices)],
            **fingerprint_field(self._request),
            "usage": self._usage(result.usage),
            "tandem": placement_body(result.usage),
            "prompt_token_ids": None,
            "prompt_text": self._request.prompt_text,
            "prompt_logprobs": None,
        }
        if self._request.return_token_ids:
            body["prompt_token_ids"] = self._request.prompts[0].tokens
        if 0 in result.prompt_logprobs:
            body["prompt_logprobs"] = result.prompt_logprobs[0].body()
        return body | metrics_body(self._request, result.usage)

    def _whole(self, index: int, choice: ChoiceResult) -> dict[str, Any]:
        body = {
            "index": index,
            "message": self._message(choice),
            "logprobs": None if choice.logprobs is None else choice.logprobs.body(),
            "finish_reason": self._finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            "token_ids": None,
            **error_field(choice.error),
        }
        if self._request.return_token_ids:
            body["token_ids"] = choice.tokens
        return body

    def _message(self, choice: ChoiceResult) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": self._request.role,
            "content": self._content(choice),
            "refusal": None,
            "annotations": [],
        }
        message |= self._call_fields(choice.calls)
        has_text = choice.text.tell() or self._request.opening_text
        if not has_text and (choice.calls or self._parsed):
            message["content"] = None
        if not self._parsed:
            return message
        has_reasoning = self._request.include_reasoning and choice.reasoning.tell() > 0
        return message | _reasoning(choice.reasoning if has_reasoning else None)

    def _finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's finish reason: "stop" for a tool call that ``tool_choice`` names."""
        tools = self._request.text.tools
        if reason != "tool_calls":
            return reason
        if tools and tools.named:
            return "stop"
        return "function_call" if self._request.function_calls else reason

    def _call_fields(self, calls: Sequence[ToolCallResult]) -> dict[str, Any]:
        """The fields of a message for its tool calls."""
        if not calls:
            return {}
        if self._request.function_calls:
            return {"function_call": _call(calls[0])["function"]}
        return {"tool_calls": [_call(call) for call in calls]}

    def _call_delta(self, call: CallDelta) -> dict[str, Any]:
        delta = _call_delta(call)
        if self._request.function_calls:
            return {"function_call": delta["function"]}
        return {"tool_calls": [delta]}

    def _content(self, choice: ChoiceResult) -> str | StringIO:
        opening = self._request.opening_text
        return opening + choice.text.getvalue() if opening else choice.text

    def _logprobs(self, scored: Collection[ScoredToken]) -> dict[str, Any]:
        return {"content": [self._entries.scored(item) for item in scored], "refusal": None}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return usage_body(usage, with_reasoning=self._parsed)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head("chat.completion.chunk") | {"choices": choices}
        if self._continuous and choices:
            chunk["usage"] = self._continuous.body(choices[0]["index"])
        elif self._request.include_usage:
            chunk["usage"] = None
        return chunk

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "object": kind,
            "created": self._created,
            "model": self._request.model.name,
        }


def stream_choice(
    index: int, delta: dict[str, Any], finish_reason: str | None = None
) -> dict[str, Any]:
    """A choice of a chunk."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _call_delta(call: CallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if not call.name:
        return {"index": call.index, "function": function}
    function = {"name": call.name} | function
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _call(call: ToolCallResult) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reasoning(text: str | StringIO | None) -> dict[str, Any]:
    """The reasoning under vLLM's field name and under its former one, which DeepSeek's clients
    read."""
    return {"reasoning": text, "reasoning_content": text}
