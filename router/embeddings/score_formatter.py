"""Scores in vLLM's shape, ranked documents in Jina's and Cohere's, and the models that document
them."""

from __future__ import annotations

from operator import mul
from typing import Any, Literal

from ..generation import GenerationRequest
from ..requests.body_model import ResponseModel
from ..result import GenerationResult
from ..surface import ResponseFormatter
from .embed_formatter import EmbeddingUsage, numbers_of
from .score_request import RerankRequest, ScoreRequest


class ScoreItem(ResponseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(ResponseModel):
    """The response to POST /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem]
    usage: EmbeddingUsage


class RankedText(ResponseModel):
    """A document."""

    text: str


class RankedDocument(ResponseModel):
    """A document by its index in the request, with its text unless ``return_documents`` is
    false."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int


class RerankResponse(ResponseModel):
    """The response to POST /v1/rerank, the best document first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RankedDocument]


class _Scores(ResponseFormatter):
    """A response made of scores. Never streamed."""

    def __init__(self, request: GenerationRequest, created: int) -> None:
        assert isinstance(request, ScoreRequest), "made by parse"
        self._request = request
        self._created = created

    def scores(self, result: GenerationResult) -> list[float]:
        """The score of each pair."""
        pairs, request = self._request.pairs, self._request
        vectors = [numbers_of(result.vectors[i]) for i in range(len(request.prompts))]
        if pairs is None:
            return [vector[0] for vector in vectors]
        return [sum(map(mul, vectors[first], vectors[second])) for first, second in pairs]


class ScoreFormatter(_Scores):
    """Formats the scores of pairs, in the order of the request."""

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        tokens = result.usage.prompt_tokens
        return {
            "id": self._request.request_id,
            "object": "list",
            "created": self._created,
            "model": self._request.model.name,
            "data": [
                {"index": i, "object": "score", "score": score}
                for i, score in enumerate(self.scores(result))
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }


class RerankFormatter(_Scores):
    """Formats documents with their scores, the best first."""

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        request, tokens = self._request, result.usage.prompt_tokens
        assert isinstance(request, RerankRequest), "made by parse"
        ranking = sorted(enumerate(self.scores(result)), key=lambda item: -item[1])
        documents = request.documents
        return {
            "id": request.request_id,
            "model": request.model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": [
                {"index": i, "relevance_score": score}
                | ({} if documents is None else {"document": {"text": documents[i]}})
                for i, score in ranking[: request.top_n]
            ],
        }
