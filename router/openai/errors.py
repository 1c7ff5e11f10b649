"""Errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from ..errors import ApiError
from ..http.encoding import data_event


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON of an error response, also outside of any surface."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


class OpenAIErrors:
    """Errors in OpenAI's shape."""

    def error_body(self, error: ApiError) -> Any:
        return error_body(error)

    def error_event(self, error: ApiError) -> bytes:
        return data_event(error_body(error))
