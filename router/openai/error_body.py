"""OpenAI's error body."""

from __future__ import annotations

from typing import Any

from ..errors import ApiError


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON of an error response; also of errors outside of any surface."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }
