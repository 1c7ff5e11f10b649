"""OpenAI's embeddings as a surface."""

from __future__ import annotations

from typing import Any

from ..generation import GenerationRequest
from ..options import RouterOptions
from ..served_model import ServedModel
from ..surface import Surface
from .embed_formatter import EmbeddingFormatter
from .embed_request import parse_embedding


class Embeddings(Surface):
    """POST /v1/embeddings."""

    path = "/v1/embeddings"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_embedding(body, model, options)

    def formatter(self, request: GenerationRequest, created: int) -> EmbeddingFormatter:
        return EmbeddingFormatter(request, created)
