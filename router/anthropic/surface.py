"""Anthropic's Messages API as a surface."""

from __future__ import annotations

from typing import Any

from ..generation import GenerationRequest
from ..options import RouterOptions
from ..served_model import ServedModel
from ..surface import Surface
from .formatter import MessageFormatter
from .request import MessageRequest, parse_messages


class AnthropicMessages(Surface):
    """POST /v1/messages."""

    path = "/v1/messages"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_messages(body, model, options)

    def formatter(self, request: GenerationRequest, created: int) -> MessageFormatter:
        assert isinstance(request, MessageRequest), "made by parse"
        return MessageFormatter(request)
