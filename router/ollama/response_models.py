"""Ollama's responses, as /openapi.json documents them."""

from __future__ import annotations

from typing import Any, Literal

from ..requests.body_model import ResponseModel


class OllamaError(ResponseModel):
    """An error, also as the last line of a stream."""

    error: str


class OllamaTokenLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTokenLogprob):
    """One token, and the most likely tokens at its position."""

    top_logprobs: list[OllamaTokenLogprob]


class OllamaResponse(ResponseModel):
    """The fields of both routes; streams have the counts in the last line."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[OllamaLogprob] | None = None


class OllamaResponseMessage(ResponseModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class OllamaChatResponse(OllamaResponse):
    """The response to POST /api/chat, or a line of its stream."""

    message: OllamaResponseMessage


class OllamaGenerateResponse(OllamaResponse):
    """The response to POST /api/generate, or a line of its stream."""

    response: str
    thinking: str | None = None
    context: list[int] | None = None


class OllamaModelResponse(ResponseModel):
    """The response to POST /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
