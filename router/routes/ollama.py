"""Ollama's API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from starlette.types import Receive, Scope, Send

from ..errors import ApiError
from ..ollama.embeddings import (
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
)
from ..ollama.formatter import load_response
from ..ollama.models import API_VERSION, ShowRequest, entry, running, show
from ..ollama.request import OllamaChatRequest, OllamaGenerateRequest, OnlyLoadsError
from ..ollama.response_models import (
    OllamaChatResponse,
    OllamaError,
    OllamaGenerateResponse,
    OllamaModelResponse,
)
from ..ollama.surfaces import CHAT, EMBED, EMBEDDINGS, GENERATE
from ..served_model import ServedModel
from .documentation import documented, documented_errors
from .guards import KEY_CHECKED
from .responses import ComputedResponse, GenerationResponse
from .services import Exchange, RouterServices

LINES = b"application/x-ndjson"
MODELS = (
    OllamaChatRequest,
    OllamaChatResponse,
    OllamaGenerateRequest,
    OllamaGenerateResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaModelResponse,
    OllamaError,
    ShowRequest,
)


class OllamaGenerationResponse(GenerationResponse):
    """A generated response, or a fixed one to a request that only loads the model."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except OnlyLoadsError as request:
            await self._exchange.respond_json(200, load_response(request))


router = APIRouter(
    tags=["ollama"], dependencies=KEY_CHECKED, responses=documented_errors(OllamaError)
)


@router.post(
    CHAT.path, **documented(OllamaChatRequest, OllamaChatResponse, lines=OllamaChatResponse)
)
async def ollama_chat(exchange: Exchange, services: RouterServices) -> Response:
    """Generate the next message of a chat."""
    return OllamaGenerationResponse(exchange, services.handler, CHAT)


@router.post(
    GENERATE.path,
    **documented(OllamaGenerateRequest, OllamaGenerateResponse, lines=OllamaGenerateResponse),
)
async def ollama_generate(exchange: Exchange, services: RouterServices) -> Response:
    """Generate a completion of a prompt."""
    return OllamaGenerationResponse(exchange, services.handler, GENERATE)


@router.post(EMBED.path, **documented(OllamaEmbedRequest, OllamaEmbedResponse))
async def ollama_embed(exchange: Exchange, services: RouterServices) -> Response:
    """The vectors of texts."""
    return GenerationResponse(exchange, services.handler, EMBED)


@router.post(EMBEDDINGS.path, **documented(OllamaEmbeddingsRequest, OllamaEmbeddingsResponse))
async def ollama_embeddings(exchange: Exchange, services: RouterServices) -> Response:
    """The vector of a text."""
    return GenerationResponse(exchange, services.handler, EMBEDDINGS)


@router.post("/api/show", **documented(ShowRequest, OllamaModelResponse))
async def show_ollama_model(exchange: Exchange, services: RouterServices) -> Response:
    """The served model."""

    def work(body: Any, model: ServedModel, ignored: set[str]) -> dict[str, Any]:
        return show(body, model, services.options, ignored)

    return ComputedResponse(exchange, services.handler, work)


@router.get("/api/tags")
async def list_ollama_models(services: RouterServices) -> dict[str, Any]:
    """The served model."""
    return {"models": [entry(services.registry.model())]}


@router.get("/api/ps")
async def list_running_models(services: RouterServices) -> dict[str, Any]:
    """The served model, which is always loaded."""
    return {"models": [running(services.registry.model())]}


@router.get("/api/version")
async def show_ollama_version() -> dict[str, str]:
    """The version of Ollama's API."""
    return {"version": API_VERSION}


@router.post("/api/pull")
@router.post("/api/push")
@router.post("/api/create")
@router.post("/api/copy")
@router.delete("/api/delete")
async def refuse_management() -> Response:
    """501, because only the operator can change the model."""
    message = "This server serves one model; clients cannot change it."
    raise ApiError(501, message, code="not_implemented")
