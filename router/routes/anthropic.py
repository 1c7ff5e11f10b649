"""Anthropic's Messages API."""

from __future__ import annotations

from typing import get_args

from fastapi import APIRouter, Response

from ..anthropic.request import CountTokensRequest, MessagesRequest, count_prompt_tokens
from ..anthropic.response_models import (
    AnthropicError,
    AnthropicMessage,
    MessageEvent,
    TokenCount,
)
from ..anthropic.surface import AnthropicMessages
from .documentation import documented, documented_errors
from .guards import KEY_CHECKED
from .responses import ComputedResponse, GenerationResponse
from .services import Exchange, RouterServices

MESSAGES = AnthropicMessages()
MODELS = (
    MessagesRequest,
    AnthropicMessage,
    CountTokensRequest,
    TokenCount,
    AnthropicError,
    *get_args(MessageEvent),
)

router = APIRouter(
    tags=["anthropic"], dependencies=KEY_CHECKED, responses=documented_errors(AnthropicError)
)


@router.post(
    MESSAGES.path, **documented(MessagesRequest, AnthropicMessage, MessageEvent | AnthropicError)
)
async def create_message(exchange: Exchange, services: RouterServices) -> Response:
    """Generate the next message of a conversation."""
    return GenerationResponse(exchange, services.handler, MESSAGES)


@router.post("/v1/messages/count_tokens", **documented(CountTokensRequest, TokenCount))
async def count_message_tokens(exchange: Exchange, services: RouterServices) -> Response:
    """Count the tokens of a message's prompt."""
    return ComputedResponse(exchange, services.handler, count_prompt_tokens)
