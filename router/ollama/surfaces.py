"""Ollama's API as surfaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..generation import GenerationRequest
from ..options import RouterOptions
from ..served_model import ServedModel
from ..surface import ResponseFormatter, Surface
from .embeddings import EmbedFormatter, OlderEmbeddingFormatter, read_embed, read_embeddings
from .formatter import OllamaFormatter
from .request import OllamaRequest, read_chat, read_generate


@dataclass(frozen=True, slots=True)
class OllamaSurface(Surface):
    """A route: ``read`` translates its bodies, ``response_formatter`` creates its formatters."""

    path: str
    read: Callable[[Any, ServedModel, RouterOptions], OllamaRequest]
    response_formatter: Callable[[OllamaRequest], ResponseFormatter]

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return self.read(body, model, options)

    def formatter(self, request: GenerationRequest, created: int) -> ResponseFormatter:
        assert isinstance(request, OllamaRequest), "made by parse"
        return self.response_formatter(request)


CHAT = OllamaSurface("/api/chat", read_chat, lambda request: OllamaFormatter(request, chat=True))
GENERATE = OllamaSurface(
    "/api/generate", read_generate, lambda request: OllamaFormatter(request, chat=False)
)
EMBED = OllamaSurface("/api/embed", read_embed, EmbedFormatter)
EMBEDDINGS = OllamaSurface("/api/embeddings", read_embeddings, OlderEmbeddingFormatter)
