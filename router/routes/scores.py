"""vLLM's scoring and classification of texts, and Jina's and Cohere's reranking."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ..embeddings.classify_formatter import ClassifyResponse
from ..embeddings.classify_request import ClassifyBody
from ..embeddings.score_formatter import RerankResponse, ScoreList
from ..embeddings.score_request import RerankBody, ScoreBody, TextObject
from ..embeddings.surfaces import Classify, Rerank, Score
from ..openai.response_models import OpenAIError
from .documentation import documented, documented_errors
from .guards import KEY_CHECKED
from .responses import GenerationResponse
from .services import Exchange, RouterServices

SCORE, RERANK, CLASSIFY = Score(), Rerank(), Classify()
MODELS = (
    *(ScoreBody, ScoreList, RerankBody, RerankResponse, TextObject),
    *(ClassifyBody, ClassifyResponse),
)

router = APIRouter(
    tags=["scores"], dependencies=KEY_CHECKED, responses=documented_errors(OpenAIError)
)


@router.post("/score", **documented(ScoreBody, ScoreList))
@router.post(SCORE.path, **documented(ScoreBody, ScoreList))
async def score(exchange: Exchange, services: RouterServices) -> Response:
    """Scores of pairs of texts, by a cross-encoder or by the cosine of their embeddings."""
    return GenerationResponse(exchange, services.handler, SCORE)


@router.post("/rerank", **documented(RerankBody, RerankResponse))
@router.post("/v2/rerank", **documented(RerankBody, RerankResponse))
@router.post(RERANK.path, **documented(RerankBody, RerankResponse))
async def rerank(exchange: Exchange, services: RouterServices) -> Response:
    """Documents sorted by their relevance to a query, best first."""
    return GenerationResponse(exchange, services.handler, RERANK)


@router.post("/v1/classify", **documented(ClassifyBody, ClassifyResponse))
@router.post(CLASSIFY.path, **documented(ClassifyBody, ClassifyResponse))
async def classify(exchange: Exchange, services: RouterServices) -> Response:
    """Classify texts: their scores for each label."""
    return GenerationResponse(exchange, services.handler, CLASSIFY)
