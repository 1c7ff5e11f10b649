"""Ollama's API as surfaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..generation import GenerationRequest
from ..options import RouterOptions
from ..served_model import ServedModel
from ..surface import Response, Surface
from .embeddings import EmbedResponse, OlderEmbeddingResponse, read_embed, read_embeddings
from .request import OllamaRequest, read_chat, read_generate
from .response import OllamaResponse


@dataclass(frozen=True, slots=True)
class OllamaSurface(Surface):
    """A route whose body ``read`` translates, and whose answers a ``formatter`` writes."""

    path: str
    read: Callable[[Any, ServedModel, RouterOptions], OllamaRequest]
    formatter: Callable[[OllamaRequest], Response]

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return self.read(body, model, options)

    def response(self, request: GenerationRequest, created: int) -> Response:
        assert isinstance(request, OllamaRequest), "made by parse"
        return self.formatter(request)


CHAT = OllamaSurface("/api/chat", read_chat, lambda request: OllamaResponse(request, chat=True))
GENERATE = OllamaSurface(
    "/api/generate", read_generate, lambda request: OllamaResponse(request, chat=False)
)
EMBED = OllamaSurface("/api/embed", read_embed, EmbedResponse)
EMBEDDINGS = OllamaSurface("/api/embeddings", read_embeddings, OlderEmbeddingResponse)
