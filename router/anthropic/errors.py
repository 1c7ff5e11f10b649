"""Errors in Anthropic's shape."""

from __future__ import annotations

from typing import Any

from ..errors import ApiError
from ..http.encoding import named_event

# By HTTP status; any other is an invalid request.
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrors:
    """Errors in Anthropic's shape, which has neither a parameter nor a code."""

    def error_body(self, error: ApiError) -> Any:
        kind = KINDS.get(error.status, "invalid_request_error")
        detail = {"type": kind, "message": error.message}
        return {"type": "error", "error": detail, "request_id": error.request_id}

    def error_event(self, error: ApiError) -> bytes:
        return named_event("error", self.error_body(error))
