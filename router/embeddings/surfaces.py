"""Embeddings, scores, reranking and classification as surfaces."""

from __future__ import annotations

from typing import Any

from ...shared.scoring import ROUTES
from ..generation import GenerationRequest
from ..options import RouterOptions
from ..served_model import ServedModel
from ..surface import Surface
from .classify_formatter import ClassifyFormatter
from .classify_request import parse_classify
from .embed_formatter import EmbeddingFormatter
from .embed_request import parse_embedding
from .score_formatter import RerankFormatter, ScoreFormatter
from .score_request import parse_rerank, parse_score


class Embeddings(Surface):
    """POST /v1/embeddings."""

    path = ROUTES["vectors"]

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_embedding(body, model, options)

    def formatter(self, request: GenerationRequest, created: int) -> EmbeddingFormatter:
        return EmbeddingFormatter(request, created)


class Score(Surface):
    """POST /v1/score."""

    path = "/v1/score"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_score(body, model, options)

    def formatter(self, request: GenerationRequest, created: int) -> ScoreFormatter:
        return ScoreFormatter(request, created)


class Rerank(Surface):
    """POST /v1/rerank."""

    path = ROUTES["pair"]

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_rerank(body, model, options)

    def formatter(self, request: GenerationRequest, created: int) -> RerankFormatter:
        return RerankFormatter(request, created)


class Classify(Surface):
    """POST /classify."""

    path = ROUTES["labels"]

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return parse_classify(body, model, options)

    def formatter(self, request: GenerationRequest, created: int) -> ClassifyFormatter:
        return ClassifyFormatter(request, created)
