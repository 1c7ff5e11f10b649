"""The response object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..errors import ApiError
from ..generation import GenerationRequest
from ..usage import Usage
from .request import CreateResponseRequest
from .tools import shown_tool

# The statuses that no other follows.
ENDED = frozenset(("completed", "incomplete", "failed", "cancelled"))


def response_body(
    request: GenerationRequest,
    asked: CreateResponseRequest,
    created: int,
    status: str,
    output: Sequence[dict[str, Any]] = (),
    usage: Usage | None = None,
    error: ApiError | None = None,
) -> dict[str, Any]:
    """A response of the status, with what it has so far."""
    sampling = request.sampling
    cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": request.request_id,
        "object": "response",
        "created_at": created,
        "completed_at": int(time.time()) if status == "completed" else None,
        "status": status,
        "background": asked.background,
        "error": None if error is None else _error(error),
        "incomplete_details": cut,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata,
        "model": request.model.name,
        "output": list(output),
        "frequency_penalty": round(sampling.frequency_penalty, 6),
        "parallel_tool_calls": asked.parallel_tool_calls,
        "presence_penalty": round(sampling.presence_penalty, 6),
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": _text_of(asked.prompt_cache_key),
        "reasoning": {
            "effort": asked.reasoning.get("effort"),
            "summary": asked.reasoning.get("summary"),
        },
        "safety_identifier": _text_of(asked.safety_identifier),
        "service_tier": "default",
        "store": asked.store,
        "temperature": round(sampling.temperature, 6),
        "text": _text(asked),
        "tool_choice": asked.tool_choice or "auto",
        "tools": [shown_tool(tool) for tool in asked.tools],
        "top_logprobs": asked.top_logprobs,
        "top_p": round(sampling.top_p, 6),
        "truncation": asked.truncation,
        "usage": None if usage is None else response_usage(usage),
        "user": _text_of(asked.user),
    }


def _text(asked: CreateResponseRequest) -> dict[str, Any]:
    verbosity = asked.text.get("verbosity")
    shown = {"format": asked.text.get("format") or {"type": "text"}}
    return shown if verbosity is None else shown | {"verbosity": verbosity}


def _text_of(value: object) -> str | None:
    """A field that is taken in any form, and returned if it is a text."""
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
