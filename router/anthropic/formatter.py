"""Messages in Anthropic's shape, whole and as the events of a stream."""

from __future__ import annotations

from typing import Any

from ...shared.text.reasoning import NO_PARSER
from ..generation import ChoiceDelta
from ..requests.call_arguments import read_arguments
from ..result import ChoiceResult, GenerationResult, ToolCallResult
from ..surface import ResponseFormatter
from ..usage import Usage
from .message_blocks import BlockWriter, message_event, signature_of, tool_use
from .request import MessageRequest

Stop = dict[str, Any]


class MessageFormatter(ResponseFormatter):
    """Formats one response. Reasoning is left out unless the request asks for it."""

    def __init__(self, request: MessageRequest) -> None:
        self._request = request
        self._parsed = request.text.reasoning_parser != NO_PARSER
        self._signature = signature_of(request.request_id)
        self._blocks = BlockWriter(self._signature, omit_thinking=request.omit_thinking)
        self._stop: Stop = {"stop_reason": None, "stop_sequence": None}

    def opening(self) -> bytes:
        """The message without content. The cached part of the prompt is reported at the end."""
        usage = self._usage(Usage(prompt_tokens=self._request.prompt_tokens))
        message = self._message([], self._stop, usage)
        return message_event("message_start", message=message) + self.ping()

    def ping(self) -> bytes:
        """A keep-alive event, for instance while a long prompt is computed."""
        return message_event("ping")

    def chunk(self, delta: ChoiceDelta) -> bytes:
        events = b""
        if delta.reasoning and self._request.include_reasoning:
            events += self._blocks.thinking(delta.reasoning)
        if delta.text:
            events += self._blocks.text(delta.text)
        for call in delta.calls:
            events += self._blocks.call(call)
        if delta.finish_reason is not None:
            self._stop = _stop(delta.finish_reason, delta.stop_reason)
            events += self._blocks.close()
        return events

    def closing(self, usage: Usage) -> bytes:
        """The stop reason and the usage."""
        fields = {"delta": self._stop, "usage": self._usage(usage), **self._edits()}
        return message_event("message_delta", **fields)

    def end_of_stream(self) -> bytes:
        return message_event("message_stop")

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        (choice,) = result.choices
        stop = _stop(choice.finish_reason, choice.stop_reason)
        usage = self._usage(result.usage)
        return self._message(self._content(choice), stop, usage) | self._edits()

    def _content(self, choice: ChoiceResult) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = []
        if self._request.include_reasoning and choice.reasoning.tell():
            thinking = "" if self._request.omit_thinking else choice.reasoning
            block = {"type": "thinking", "thinking": thinking, "signature": self._signature}
            content.append(block)
        if not (content or choice.calls) or not _is_blank(choice):
            content.append({"type": "text", "text": choice.text, "citations": None})
        return content + [_tool_use(call) for call in choice.calls]

    def _message(self, content: list[dict[str, Any]], stop: Stop, usage: Any) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model.name,
            "content": content,
            **stop,
            "stop_details": None,
            "container": None,
            "usage": usage,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """The usage; as in Anthropic's API, ``input_tokens`` excludes cached tokens."""
        body: dict[str, Any] = {
            "input_tokens": usage.prompt_tokens - usage.all_cached_tokens,
            "cache_creation": None,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.all_cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": None,
            "server_tool_use": None,
            "service_tier": None,
            "inference_geo": None,
        }
        if self._parsed:
            body["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
        return body

    def _edits(self) -> dict[str, Any]:
        edits = self._request.applied_edits
        return {} if edits is None else {"context_management": {"applied_edits": edits}}


def _tool_use(call: ToolCallResult) -> dict[str, Any]:
    """A tool call. Arguments that were cut off are not valid JSON and are left out."""
    return tool_use(call.id, call.name, read_arguments(call.arguments.getvalue()))


def _is_blank(choice: ChoiceResult) -> bool:
    text = choice.text.getvalue()
    return not text or text.isspace()


def _stop(finish_reason: str | None, stop_reason: str | int | None) -> Stop:
    if finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if finish_reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}
