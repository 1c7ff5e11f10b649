"""OpenAI's API: chat completions, text completions and models."""

from __future__ import annotations

from fastapi import APIRouter, Response
from pydantic import BaseModel

from ..openai.surfaces import ChatCompletions, Completions
from ..served_model import ModelCard
from .generation_response import GenerationResponse
from .guards import KEY_CHECKED
from .services import Exchange, RouterServices

CHAT = ChatCompletions()
COMPLETIONS = Completions()

router = APIRouter(tags=["openai"], dependencies=KEY_CHECKED)


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelCard]


@router.post(CHAT.path)
async def create_chat_completion(exchange: Exchange, services: RouterServices) -> Response:
    """Generate the next message of a chat."""
    return GenerationResponse(exchange, services.handler, CHAT)


@router.post(COMPLETIONS.path)
async def create_completion(exchange: Exchange, services: RouterServices) -> Response:
    """Continue a text."""
    return GenerationResponse(exchange, services.handler, COMPLETIONS)


@router.get("/v1/models")
async def list_models(services: RouterServices) -> ModelList:
    """The model that this router serves."""
    return ModelList(data=[services.registry.model().card()])


@router.get("/v1/models/{model:path}")
async def show_model(model: str, services: RouterServices) -> ModelCard:
    """The model of this name; names may contain slashes."""
    served = services.registry.model()
    served.check_name(model or "?")
    return served.card()
