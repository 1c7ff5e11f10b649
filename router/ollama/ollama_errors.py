"""Errors in Ollama's shape."""

from __future__ import annotations

from typing import Any

from ..errors import ApiError
from ..http.encoding import dump


class OllamaErrors:
    """Errors in Ollama's shape: a message."""

    def error_body(self, error: ApiError) -> Any:
        return {"error": error.message}

    def error_event(self, error: ApiError) -> bytes:
        return dump(self.error_body(error)) + b"\n"
