"""Requests without a prompt, by which Ollama's clients have a model loaded before they use it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


class OnlyLoadsError(Exception):
    """Nothing is asked; ``content`` is the part of the answer that is empty."""

    def __init__(self, asked_model: str, content: dict[str, Any]) -> None:
        super().__init__("a request without a prompt")
        self._asked_model = asked_model
        self._content = content

    def answer(self) -> dict[str, Any]:
        """The whole answer: the model is loaded, as always."""
        made = timestamp()
        head = {"model": self._asked_model, "created_at": made}
        return {**head, **self._content, "done": True, "done_reason": "load"}


def timestamp() -> str:
    """The time now, as Ollama writes it."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
