"""OpenAI's API as two surfaces: chat completions and text completions."""

from __future__ import annotations

from typing import Any

from ..errors import ApiError
from ..generation import GenerationRequest
from ..http.sse import data_event
from ..options import RouterOptions
from ..served_model import ServedModel
from .chat_request import parse_chat
from .chat_response import ChatResponse
from .completion_request import parse_completion
from .completion_response import CompletionResponse
from .error_body import error_body


class _OpenAI:
    def error_body(self, error: ApiError) -> Any:
        return error_body(error)

    def error_event(self, error: ApiError) -> bytes:
        return data_event(error_body(error))


class ChatCompletions(_OpenAI):
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_chat(body, model, options)

    def response(self, request: GenerationRequest, created: int) -> ChatResponse:
        return ChatResponse(request, created)


class Completions(_OpenAI):
    """POST /v1/completions."""

    path = "/v1/completions"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_completion(body, model, options)

    def response(self, request: GenerationRequest, created: int) -> CompletionResponse:
        return CompletionResponse(request, created)
