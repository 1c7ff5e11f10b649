"""OpenAI's responses as a surface: a chat whose earlier turns may be in the store."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from ..errors import ApiError
from ..generation import GenerationRequest
from ..http.sse import named_event
from ..openai.chat_request import parse_chat
from ..openai.error_body import OpenAIErrors
from ..options import RouterOptions
from ..served_model import ServedModel
from .response_events import ResponseEvents
from .response_request import CreateResponseRequest, InputItems, chat_body, read_input
from .response_store import ResponseStore


class Responses:
    """POST /v1/responses, for one request of the ``owner`` of a key."""

    path = "/v1/responses"

    def __init__(self, store: ResponseStore, owner: str) -> None:
        self._stored = store
        self._owner = owner
        self._asked: CreateResponseRequest
        self._input: InputItems
        self._conversation: list[dict[str, Any]]

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        ignored: set[str] = set()
        self._asked = asked = CreateResponseRequest.read(body, ignored)
        self._input = read_input(asked.input)
        earlier: list[dict[str, Any]] = []
        if asked.previous_response_id is not None:
            name = "previous_response_id"
            earlier = self._stored.get(asked.previous_response_id, self._owner, name).conversation
        self._conversation = [*earlier, *self._input.messages]
        told = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        request = parse_chat(chat_body(asked, [*told, *self._conversation]), model, options)
        return replace(
            request, request_id=f"resp_{uuid.uuid4().hex}", ignored={*ignored, *request.ignored}
        )

    def response(self, request: GenerationRequest, created: int) -> ResponseEvents:
        return ResponseEvents(request, created, self._asked, self._store)

    def _store(self, body: dict[str, Any], text: str) -> None:
        """Keep a response that has ended, unless the client wants none of it kept."""
        if self._asked.store:
            conversation = [*self._conversation, {"role": "assistant", "content": text}]
            characters = sum(len(str(message["content"])) for message in conversation)
            self._stored.add(self._owner, body, self._input.items, conversation, characters)


class ResponseErrors(OpenAIErrors):
    """OpenAI's errors, with an event of its own at the end of a stream."""

    def error_event(self, error: ApiError) -> bytes:
        value = {
            "type": "error",
            "sequence_number": 0,
            "code": error.code,
            "message": error.message,
            "param": error.param,
        }
        return named_event("error", value)
