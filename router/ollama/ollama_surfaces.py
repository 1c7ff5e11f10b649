"""Ollama's API as two surfaces: chat and generate."""

from __future__ import annotations

from typing import Any

from ..generation import GenerationRequest
from ..options import RouterOptions
from ..served_model import ServedModel
from ..surface import Surface
from .ollama_request import OllamaRequest, parse_chat, parse_generate
from .ollama_response import OllamaResponse


class OllamaChat(Surface):
    """POST /api/chat."""

    path = "/api/chat"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_chat(body, model, options)

    def response(self, request: GenerationRequest, created: int) -> OllamaResponse:
        assert isinstance(request, OllamaRequest), "made by parse"
        return OllamaResponse(request, chat=True)


class OllamaGenerate(Surface):
    """POST /api/generate."""

    path = "/api/generate"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_generate(body, model, options)

    def response(self, request: GenerationRequest, created: int) -> OllamaResponse:
        assert isinstance(request, OllamaRequest), "made by parse"
        return OllamaResponse(request, chat=False)
