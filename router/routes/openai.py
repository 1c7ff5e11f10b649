"""OpenAI's API: chat completions, text completions and models."""

from __future__ import annotations

from fastapi import APIRouter, Response
from pydantic import BaseModel

from ..anthropic.models import (
    VERSION_HEADER,
    AnthropicModel,
    AnthropicModelList,
    model_entry,
    model_page,
)
from ..mcp.chat import McpChatCompletions
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
from ..served_model import ModelCard
from .documentation import documented, documented_errors
from .guards import KEY_CHECKED
from .responses import GenerationResponse
from .services import Exchange, RouterServices

CHAT = ChatCompletions()
COMPLETIONS = Completions()

MODELS = (
    ChatCompletionRequest,
    ChatCompletion,
    ChatCompletionChunk,
    CompletionRequest,
    TextCompletion,
    TextCompletionChunk,
    OpenAIError,
)

router = APIRouter(
    tags=["openai"], dependencies=KEY_CHECKED, responses=documented_errors(OpenAIError)
)


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelCard]


@router.post(
    CHAT.path,
    **documented(
        ChatCompletionRequest, ChatCompletion, ChatCompletionChunk | OpenAIError, last=LAST_DATA
    ),
)
async def create_chat_completion(exchange: Exchange, services: RouterServices) -> Response:
    """Generate the next message of a chat."""
    chat = services.chat
    surface = McpChatCompletions(chat, exchange.owner.name) if chat.has_servers else CHAT
    return GenerationResponse(exchange, services.handler, surface)


@router.post(
    COMPLETIONS.path,
    **documented(
        CompletionRequest, TextCompletion, TextCompletionChunk | OpenAIError, last=LAST_DATA
    ),
)
async def create_completion(exchange: Exchange, services: RouterServices) -> Response:
    """Continue a text."""
    return GenerationResponse(exchange, services.handler, COMPLETIONS)


@router.get("/v1/models")
async def list_models(
    exchange: Exchange,
    services: RouterServices,
    after_id: str | None = None,
    before_id: str | None = None,
    limit: str | None = None,
) -> ModelList | AnthropicModelList:
    """The served model, once for each of its names. Anthropic's clients, which send the header
    ``anthropic-version``, get the list in Anthropic's format."""
    served = services.registry.model()
    if exchange.header(VERSION_HEADER):
        return model_page(served, after_id, before_id, limit)
    return ModelList(data=[served.card(name) for name in (served.name, *served.aliases)])


@router.get("/v1/models/{model:path}")
async def show_model(
    model: str, exchange: Exchange, services: RouterServices
) -> ModelCard | AnthropicModel:
    """The model with this name, which may contain slashes."""
    served = services.registry.model()
    served.check_name(model or "?")
    if exchange.header(VERSION_HEADER):
        return model_entry(served, model)
    return served.card(model)
