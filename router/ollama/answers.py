"""Ollama's answers, as /openapi.json documents them."""

from __future__ import annotations

from typing import Any, Literal

from ..requests.body_model import AnswerModel


class OllamaError(AnswerModel):
    """An error, also as the last line of a stream."""

    error: str


class OllamaTokenLogprob(AnswerModel):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTokenLogprob):
    """One token, and the most likely ones in its place."""

    top_logprobs: list[OllamaTokenLogprob]


class OllamaAnswer(AnswerModel):
    """The fields of both routes; in a stream the counts come with the last line."""

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


class OllamaAnswerMessage(AnswerModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class OllamaChatAnswer(OllamaAnswer):
    """The answer of POST /api/chat, or a line of its stream."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer):
    """The answer of POST /api/generate, or a line of its stream."""

    response: str
    thinking: str | None = None
    context: list[int] | None = None


class OllamaModelAnswer(AnswerModel):
    """The answer of POST /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
