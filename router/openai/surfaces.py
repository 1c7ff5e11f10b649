"""OpenAI's API as two surfaces: chat completions and text completions."""

from __future__ import annotations

from typing import Any

from ..generation import GenerationRequest
from ..options import RouterOptions
from ..served_model import ServedModel
from ..surface import Surface
from .chat_request import ChatRequest, parse_chat
from .chat_response import ChatResponse
from .completion_request import parse_completion
from .completion_response import CompletionResponse
from .request_fields import OpenAIRequest


class ChatCompletions(Surface):
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_chat(body, model, options)

    def response(self, request: GenerationRequest, created: int) -> ChatResponse:
        assert isinstance(request, ChatRequest), "made by parse"
        return ChatResponse(request, created)


class Completions(Surface):
    """POST /v1/completions."""

    path = "/v1/completions"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_completion(body, model, options)

    def response(self, request: GenerationRequest, created: int) -> CompletionResponse:
        assert isinstance(request, OpenAIRequest), "made by parse"
        return CompletionResponse(request, created)
