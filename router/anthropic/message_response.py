"""Messages in Anthropic's shape, whole and as the events of a stream."""

from __future__ import annotations

from typing import Any

from ..generation import ChoiceDelta, GenerationRequest, Usage
from ..http.sse import named_event
from ..result import GenerationResult


class MessageResponse:
    """Formats one response. Reasoning is left out, as no request can ask for it."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def opening(self) -> bytes:
        """The message without its text, and the begin of its only block."""
        usage = {"input_tokens": self._request.prompt_tokens, "output_tokens": 0}
        message = self._message([], self._stop, usage)
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        return _event("message_start", message=message) + _event("content_block_start", **block)

    def chunk(self, delta: ChoiceDelta) -> bytes:
        events = b""
        if delta.text:
            text = {"type": "text_delta", "text": delta.text}
            events += _event("content_block_delta", index=0, delta=text)
        if delta.finish_reason is not None:
            self._stop = _stop(delta.finish_reason, delta.stop_reason)
            events += _event("content_block_stop", index=0)
        return events

    def closing(self, usage: Usage) -> bytes:
        """The reason of the end, with the usage."""
        return _event("message_delta", delta=self._stop, usage=_usage(usage))

    def end_of_stream(self) -> bytes:
        return _event("message_stop")

    def choice_logprobs(self) -> None:
        return None

    def prompt_logprobs(self) -> None:
        return None

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        (choice,) = result.choices
        content = [{"type": "text", "text": choice.text}]
        stop = _stop(choice.finish_reason, choice.stop_reason)
        return self._message(content, stop, _usage(result.usage))

    def _message(
        self, content: list[dict[str, Any]], stop: dict[str, Any], usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model.name,
            "content": content,
            **stop,
            "usage": usage,
        }


def _event(name: str, **fields: Any) -> bytes:
    return named_event(name, {"type": name, **fields})


def _stop(finish_reason: str | None, stop_reason: str | int | None) -> dict[str, Any]:
    if finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
