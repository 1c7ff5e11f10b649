"""OpenAI's API: embeddings."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ..embeddings.embed_formatter import EmbeddingList
from ..embeddings.embed_request import CreateEmbeddingRequest
from ..embeddings.surfaces import Embeddings
from ..openai.response_models import OpenAIError
from .documentation import documented, documented_errors
from .guards import KEY_CHECKED
from .responses import GenerationResponse
from .services import Exchange, RouterServices

EMBEDDINGS = Embeddings()
MODELS = (CreateEmbeddingRequest, EmbeddingList)

router = APIRouter(
    tags=["openai"], dependencies=KEY_CHECKED, responses=documented_errors(OpenAIError)
)


@router.post(EMBEDDINGS.path, **documented(CreateEmbeddingRequest, EmbeddingList))
async def create_embedding(exchange: Exchange, services: RouterServices) -> Response:
    """Embeddings of texts, from the model's final hidden states."""
    return GenerationResponse(exchange, services.handler, EMBEDDINGS)
