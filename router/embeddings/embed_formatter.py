"""Embeddings in OpenAI's shape, and the models that document them."""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Any, Literal

from ..generation import GenerationRequest
from ..requests.body_model import ResponseModel
from ..result import GenerationResult
from ..surface import ResponseFormatter


class EmbeddingItem(ResponseModel):
    """The vector of one input: numbers, or float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: Literal[0]


class EmbeddingList(ResponseModel):
    """The response to POST /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: EmbeddingUsage


class EmbeddingFormatter(ResponseFormatter):
    """Formats one response. Never streamed."""

    def __init__(self, request: GenerationRequest, created: int) -> None:
        self._request = request
        self._created = created
        self._in_base64 = request.embed is not None and request.embed.in_base64

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "object": "list",
            "created": self._created,
            "model": self._request.model.name,
            "data": [
                {"object": "embedding", "index": i, "embedding": vector}
                for i, vector in enumerate(self.vectors(result))
            ],
            "usage": {
                "prompt_tokens": result.usage.prompt_tokens,
                "total_tokens": result.usage.prompt_tokens,
                "completion_tokens": 0,
            },
        }

    def vectors(self, result: GenerationResult) -> list[array[float] | str]:
        """The vector of each prompt."""
        return [self._vector(result.vectors[i]) for i in range(len(self._request.prompts))]

    def _vector(self, values: bytes) -> array[float] | str:
        return base64.b64encode(values).decode() if self._in_base64 else numbers_of(values)


def numbers_of(values: bytes) -> array[float]:
    """The numbers of a packed vector."""
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
