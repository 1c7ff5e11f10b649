"""A response in OpenAI's shape, whole and as the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from ..generation import ChoiceDelta, GenerationRequest, Usage
from ..http.sse import named_event
from ..result import GenerationResult
from .response_request import CreateResponseRequest

# Called with the body of a response that has ended, and its text.
Store = Callable[[dict[str, Any], str], None]


class ResponseEvents:
    """Formats one response: a reasoning item if there is reasoning, then a message."""

    def __init__(
        self,
        request: GenerationRequest,
        created: int,
        asked: CreateResponseRequest,
        store: Store,
    ) -> None:
        self._request = request
        self._created = created
        self._asked = asked
        self._store = store
        self._number = 0
        self._kind = ""  # of the item that is being written
        self._id = ""
        self._text: list[str] = []
        self._output: list[dict[str, Any]] = []
        self._finish: str | None = None

    # ---- the events of a stream --------------------------------------------------------------

    def opening(self) -> bytes:
        body = self._body("in_progress", [], None)
        return self._event("response.created", response=body) + self._event(
            "response.in_progress", response=body
        )

    def chunk(self, delta: ChoiceDelta) -> bytes:
        events = b""
        if delta.reasoning and self._request.include_reasoning:
            events += self._added("reasoning", delta.reasoning)
        if delta.text:
            events += self._added("message", delta.text)
        self._finish = delta.finish_reason or self._finish
        return events

    def closing(self, usage: Usage) -> bytes:
        events = b"" if self._output or self._kind == "message" else self._begun("message")
        events += self._ended()
        status = _status(self._finish)
        body = self._body(status, self._output, usage)
        self._store(body, self._message_text())
        return events + self._event(f"response.{status}", response=body)

    def end_of_stream(self) -> bytes:
        return b""

    def _added(self, kind: str, text: str) -> bytes:
        """New text of an item, which begins and ends others where necessary."""
        events = b""
        if self._kind != kind:
            events = self._ended() + self._begun(kind)
        self._text.append(text)
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        fields: dict[str, Any] = {"delta": text} | ({"logprobs": []} if kind == "message" else {})
        return events + self._event(f"response.{name}.delta", **self._place(), **fields)

    def _begun(self, kind: str) -> bytes:
        self._kind, self._text = kind, []
        self._id = _item_id(kind)
        item = _item(kind, self._id, "", "in_progress") | {"content": []}
        added = self._event("response.output_item.added", output_index=len(self._output), item=item)
        part = _part(kind, "")
        return added + self._event("response.content_part.added", **self._place(), part=part)

    def _ended(self) -> bytes:
        """The end of the item that is being written, if there is one."""
        if not self._kind:
            return b""
        kind, text, place = self._kind, "".join(self._text), self._place()
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        fields: dict[str, Any] = {"text": text} | ({"logprobs": []} if kind == "message" else {})
        item = _item(kind, self._id, text, _item_status(self._finish))
        events = self._event(f"response.{name}.done", **place, **fields)
        events += self._event("response.content_part.done", **place, part=_part(kind, text))
        events += self._event(
            "response.output_item.done", output_index=len(self._output), item=item
        )
        self._output.append(item)
        self._kind = ""
        return events

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event(kind, {"type": kind, "sequence_number": self._number - 1, **fields})

    def _message_text(self) -> str:
        texts = [item["content"][0]["text"] for item in self._output if item["type"] == "message"]
        return "".join(texts)

    # ---- the whole ---------------------------------------------------------------------------

    def choice_logprobs(self) -> None:
        return None

    def prompt_logprobs(self) -> None:
        return None

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        (choice,) = result.choices
        reasoning, text = choice.reasoning.getvalue(), choice.text.getvalue()
        status = _item_status(choice.finish_reason)
        if reasoning and self._request.include_reasoning:
            self._output.append(_item("reasoning", _item_id("reasoning"), reasoning, status))
        self._output.append(_item("message", _item_id("message"), text, status))
        body = self._body(_status(choice.finish_reason), self._output, result.usage)
        self._store(body, text)
        return body

    def _body(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        asked, sampling = self._asked, self._request.sampling
        ended = status == "completed"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._request.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if ended else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": cut,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata,
            "model": self._request.model.name,
            "output": list(output),
            "parallel_tool_calls": True,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {
                "effort": asked.reasoning.get("effort"),
                "summary": asked.reasoning.get("summary"),
            },
            "service_tier": "default",
            "store": asked.store,
            "temperature": round(sampling.temperature, 6),
            "text": {"format": asked.text.get("format") or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": round(sampling.top_p, 6),
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": asked.user if isinstance(asked.user, str) else None,
        }


def _item_id(kind: str) -> str:
    return f"{'rs' if kind == 'reasoning' else 'msg'}_{uuid.uuid4().hex}"


def _item(kind: str, item_id: str, text: str, status: str) -> dict[str, Any]:
    item: dict[str, Any] = {
        "id": item_id,
        "type": kind,
        "status": status,
        "content": [_part(kind, text)],
    }
    if kind == "reasoning":
        return item | {"summary": []}
    return item | {"role": "assistant"}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _item_status(finish_reason: str | None) -> str:
    return _status(finish_reason)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
