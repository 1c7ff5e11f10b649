"""OpenAI's API as two surfaces: chat completions and text completions."""

from __future__ import annotations

from typing import Any

from ..generation import GenerationRequest
from ..options import RouterOptions
from ..served_model import ServedModel
from ..surface import Surface
from .chat_formatter import ChatFormatter
from .chat_request import ChatRequest, parse_chat
from .completion_formatter import CompletionFormatter
from .completion_request import parse_completion
from .request_fields import OpenAIRequest


class ChatCompletions(Surface):
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_chat(body, model, options)

    def formatter(self, request: GenerationRequest, created: int) -> ChatFormatter:
        assert isinstance(request, ChatRequest), "made by parse"
        return ChatFormatter(request, created)


class Completions(Surface):
    """POST /v1/completions."""

    path = "/v1/completions"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_completion(body, model, options)

    def formatter(self, request: GenerationRequest, created: int) -> CompletionFormatter:
        assert isinstance(request, OpenAIRequest), "made by parse"
        return CompletionFormatter(request, created)
