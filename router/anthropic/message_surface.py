"""Anthropic's Messages API as a surface."""

from __future__ import annotations

from typing import Any

from ..generation import GenerationRequest
from ..options import RouterOptions
from ..served_model import ServedModel
from ..surface import Surface
from .message_request import MessageRequest, parse_messages
from .message_response import MessageResponse


class AnthropicMessages(Surface):
    """POST /v1/messages."""

    path = "/v1/messages"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_messages(body, model, options)

    def response(self, request: GenerationRequest, created: int) -> MessageResponse:
        assert isinstance(request, MessageRequest), "made by parse"
        return MessageResponse(request)
