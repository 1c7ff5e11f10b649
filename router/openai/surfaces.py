"""OpenAI's API as two surfaces: chat completions and text completions."""

from __future__ import annotations

from typing import Any

from ..generation import GenerationRequest
from ..options import RouterOptions
from ..served_model import ServedModel
from ..surface import Surface
from .chat_request import parse_chat
from .chat_response import ChatResponse
from .completion_request import parse_completion
from .completion_response import CompletionResponse


class ChatCompletions(Surface):
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_chat(body, model, options)

    def response(self, request: GenerationRequest, created: int) -> ChatResponse:
        return ChatResponse(request, created)


class Completions(Surface):
    """POST /v1/completions."""

    path = "/v1/completions"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_completion(body, model, options)

    def response(self, request: GenerationRequest, created: int) -> CompletionResponse:
        return CompletionResponse(request, created)
