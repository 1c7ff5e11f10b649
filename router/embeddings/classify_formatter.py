"""Labels of texts in vLLM's shape, and the models that document them."""

from __future__ import annotations

from typing import Any, Literal

from ..generation import GenerationRequest
from ..requests.body_model import ResponseModel
from ..result import GenerationResult
from ..surface import ResponseFormatter
from .embed_formatter import EmbeddingUsage, numbers_of


class ClassifiedText(ResponseModel):
    """The scores of a text for all labels, and the best label."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyResponse(ResponseModel):
    """The response to POST /classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifiedText]
    usage: EmbeddingUsage


class ClassifyFormatter(ResponseFormatter):
    """Formats the labels of texts, in the order of the request. Never streamed."""

    def __init__(self, request: GenerationRequest, created: int) -> None:
        self._request = request
        self._created = created

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        request, tokens = self._request, result.usage.prompt_tokens
        return {
            "id": request.request_id,
            "object": "list",
            "created": self._created,
            "model": request.model.name,
            "data": [self._classified(i, result.vectors[i]) for i in range(len(request.prompts))],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }

    def _classified(self, index: int, values: bytes) -> dict[str, Any]:
        scores, labels = numbers_of(values), self._request.model.labels
        best = max(range(len(scores)), key=scores.__getitem__)
        return {
            "index": index,
            "label": labels[best] if best < len(labels) else None,
            "probs": scores,
            "num_classes": len(scores),
        }
