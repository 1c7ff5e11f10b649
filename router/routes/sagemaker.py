"""The two routes of a container on Amazon SageMaker, as in vLLM."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from ..embeddings.embed_formatter import EmbeddingList
from ..embeddings.embed_request import CreateEmbeddingRequest
from ..embeddings.surfaces import Embeddings
from ..errors import invalid
from ..generation import GenerationRequest
from ..openai.chat_request import ChatCompletionRequest
from ..openai.completion_request import CompletionRequest
from ..openai.response_fields import LAST_DATA
from ..openai.response_models import (
    ChatCompletion,
    ChatCompletionChunk,
    OpenAIError,
    TextCompletion,
    TextCompletionChunk,
)
from ..openai.surfaces import ChatCompletions, Completions
from ..options import RouterOptions
from ..served_model import ServedModel
from ..surface import ResponseFormatter, Surface
from .documentation import documented, documented_errors
from .guards import KEY_CHECKED
from .operations import Status
from .responses import GenerationResponse
from .services import Exchange, RouterServices

CHAT = ChatCompletions()
COMPLETIONS = Completions()
# By a field that only this kind of request has, as in vLLM.
SURFACES: dict[str, Surface] = {
    "messages": CHAT,
    "prompt": COMPLETIONS,
    "input": Embeddings(),
}

router = APIRouter(tags=["sagemaker"], responses=documented_errors(OpenAIError))


class Invocation(Surface):
    """One request, whose fields tell its kind."""

    path = "/invocations"

    def __init__(self) -> None:
        self._surface: Surface = COMPLETIONS

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        fields = body if isinstance(body, dict) else {}
        surface = next((kind for name, kind in SURFACES.items() if name in fields), None)
        if surface is None:
            raise invalid(
                "Send 'messages' for a chat, 'prompt' for a completion, or 'input' for embeddings."
            )
        self._surface = surface
        return self._surface.parse(body, model, options)

    def formatter(self, request: GenerationRequest, created: int) -> ResponseFormatter:
        return self._surface.formatter(request, created)


@router.post(
    Invocation.path,
    dependencies=KEY_CHECKED,
    **documented(
        ChatCompletionRequest | CompletionRequest | CreateEmbeddingRequest,
        ChatCompletion | TextCompletion | EmbeddingList,
        ChatCompletionChunk | TextCompletionChunk | OpenAIError,
        last=LAST_DATA,
    ),
)
async def invoke(exchange: Exchange, services: RouterServices) -> Response:
    """A chat, a completion or embeddings, by the fields of the body."""
    return GenerationResponse(exchange, services.handler, Invocation())


@router.get("/ping")
@router.post("/ping")
async def ping(services: RouterServices) -> Status:
    """503 until the router can serve for the first time, like /health."""
    services.registry.check_started()
    return Status(status="ok")
