"""The response object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..errors import ApiError
from ..generation import GenerationRequest
from ..usage import Usage
from .request import CreateResponseRequest
from .tools import tool_body

# Final statuses.
ENDED = frozenset(("completed", "incomplete", "failed", "cancelled"))


def response_body(
    request: GenerationRequest,
    params: CreateResponseRequest,
    created: int,
    status: str,
    output: Sequence[dict[str, Any]] = (),
    usage: Usage | None = None,
    error: ApiError | None = None,
) -> dict[str, Any]:
    """OpenAI's response object in a status, with the output so far."""
    sampling = request.sampling
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": request.request_id,
        "object": "response",
        "created_at": created,
        "completed_at": int(time.time()) if status == "completed" else None,
        "status": status,
        "background": params.background,
        "error": None if error is None else _error(error),
        "incomplete_details": incomplete,
        "instructions": params.instructions,
        "max_output_tokens": params.max_output_tokens,
        "max_tool_calls": params.max_tool_calls,
        "metadata": params.metadata,
        "model": request.model.name,
        "output": list(output),
        "frequency_penalty": round(sampling.frequency_penalty, 6),
        "parallel_tool_calls": params.parallel_tool_calls,
        "presence_penalty": round(sampling.presence_penalty, 6),
        "previous_response_id": params.previous_response_id,
        "prompt_cache_key": _text_of(params.prompt_cache_key),
        "reasoning": {
            "effort": params.reasoning.get("effort"),
            "summary": params.reasoning.get("summary"),
        },
        "safety_identifier": _text_of(params.safety_identifier),
        "service_tier": "default",
        "store": params.store,
        "temperature": round(sampling.temperature, 6),
        "text": _text(params),
        "tool_choice": params.tool_choice or "auto",
        "tools": [tool_body(tool) for tool in params.tools],
        "top_logprobs": params.top_logprobs,
        "top_p": round(sampling.top_p, 6),
        "truncation": params.truncation,
        "usage": None if usage is None else response_usage(usage),
        "user": _text_of(params.user),
    }


def _text(params: CreateResponseRequest) -> dict[str, Any]:
    verbosity = params.text.get("verbosity")
    text = {"format": params.text.get("format") or {"type": "text"}}
    return text if verbosity is None else text | {"verbosity": verbosity}


def _text_of(value: object) -> str | None:
    """A field of which any value is accepted, but only a text is returned."""
    return value if isinstance(value, str) else None


def response_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.all_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error(error: ApiError) -> dict[str, Any]:
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    return {"code": error.code or code, "message": error.message}
