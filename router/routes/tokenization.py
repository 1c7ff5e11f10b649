"""Text to tokens and back."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ..openai.answers import OpenAIError
from ..tokenization.to_text import DetokenizeAnswer, DetokenizeRequest, detokenize
from ..tokenization.to_tokens import (
    TokenizeAnswer,
    TokenizeChatRequest,
    TokenizeTextRequest,
    tokenize,
)
from .documentation import documented, documented_errors
from .guards import KEY_CHECKED
from .responses import ComputedResponse
from .services import Exchange, RouterServices

MODELS = (
    TokenizeTextRequest,
    TokenizeChatRequest,
    TokenizeAnswer,
    DetokenizeRequest,
    DetokenizeAnswer,
)

router = APIRouter(
    tags=["tokenization"], dependencies=KEY_CHECKED, responses=documented_errors(OpenAIError)
)


@router.post("/tokenize", **documented(TokenizeTextRequest | TokenizeChatRequest, TokenizeAnswer))
async def tokenize_prompt(exchange: Exchange, services: RouterServices) -> Response:
    """The tokens of a text, or of the messages of a chat."""
    return ComputedResponse(exchange, services.handler, tokenize)


@router.post("/detokenize", **documented(DetokenizeRequest, DetokenizeAnswer))
async def detokenize_prompt(exchange: Exchange, services: RouterServices) -> Response:
    """The text of tokens."""
    return ComputedResponse(exchange, services.handler, detokenize)
