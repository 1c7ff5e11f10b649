"""Tokenize and detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ..errors import ApiError
from ..openai.response_models import OpenAIError
from ..tokenization.to_text import DetokenizeRequest, DetokenizeResponse, detokenize
from ..tokenization.to_tokens import (
    TokenizeChatRequest,
    TokenizeContentRequest,
    TokenizeContentResponse,
    TokenizeResponse,
    TokenizeTextRequest,
    tokenize,
)
from ..tokenization.tokenizer_info import TokenizerInfo, tokenizer_info
from .documentation import documented, documented_errors
from .guards import KEY_CHECKED
from .responses import ComputedResponse
from .services import Exchange, RouterServices

MODELS = (
    TokenizeTextRequest,
    TokenizeChatRequest,
    TokenizeContentRequest,
    TokenizeResponse,
    TokenizeContentResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizerInfo,
)

router = APIRouter(
    tags=["tokenization"], dependencies=KEY_CHECKED, responses=documented_errors(OpenAIError)
)


@router.post(
    "/tokenize",
    **documented(
        TokenizeTextRequest | TokenizeChatRequest | TokenizeContentRequest,
        TokenizeResponse | TokenizeContentResponse,
    ),
)
async def tokenize_prompt(exchange: Exchange, services: RouterServices) -> Response:
    """The tokens of a text, or of the messages of a chat."""
    return ComputedResponse(exchange, services.handler, tokenize)


@router.post("/detokenize", **documented(DetokenizeRequest, DetokenizeResponse))
async def detokenize_prompt(exchange: Exchange, services: RouterServices) -> Response:
    """The text of tokens."""
    return ComputedResponse(exchange, services.handler, detokenize)


@router.get("/tokenizer_info")
async def show_tokenizer(services: RouterServices) -> TokenizerInfo:
    """The configuration of the tokenizer; 404 unless this route is enabled."""
    if not services.options.enable_tokenizer_info_endpoint:
        message = "/tokenizer_info is off; --enable-tokenizer-info-endpoint turns it on."
        raise ApiError(404, message, code="endpoint_disabled")
    return TokenizerInfo.model_validate(tokenizer_info(services.registry.model().tokenizer))
