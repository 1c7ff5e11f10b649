"""POST /api/embed and /api/embeddings, translated into the body of /v1/embeddings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ..embeddings.embed_formatter import EmbeddingFormatter
from ..embeddings.embed_request import parse_embedding
from ..embeddings.text_inputs import MAX_INPUTS
from ..errors import invalid
from ..options import RouterOptions
from ..requests.body_errors import wrong_type
from ..requests.body_model import INT32, WHOLE, DocumentedAs, ResponseModel
from ..result import GenerationResult
from ..served_model import ServedModel
from .request import OllamaBody, OllamaRequest, errors_of_ollama


class OllamaEmbedRequest(OllamaBody):
    """The body of POST /api/embed. Texts that are too long are truncated unless ``truncate`` is
    false."""

    input: Annotated[Any, DocumentedAs(str | list[str])]
    truncate: bool = True
    dimensions: Annotated[int, Field(ge=0, le=INT32 - 1), WHOLE] = 0


class OllamaEmbeddingsRequest(OllamaBody):
    """The body of POST /api/embeddings, the older route, whose vectors are not normalized."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"images": ([],)}

    prompt: Annotated[str, Field(min_length=1)]


class OllamaEmbedResponse(ResponseModel):
    """The response to POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsResponse(ResponseModel):
    """The response to POST /api/embeddings."""

    embedding: list[float]


def read_embed(body: Any, model: ServedModel, options: RouterOptions) -> OllamaRequest:
    """The embedding request of POST /api/embed. Raises ``RequestError``."""
    ignored: set[str] = set()
    request = OllamaEmbedRequest.read(body, ignored)
    texts = request.input if isinstance(request.input, list) else [request.input]
    if not 0 < len(texts) <= MAX_INPUTS:
        raise invalid(f"'input' must have 1 to {MAX_INPUTS} texts, not {len(texts)}", "input")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise wrong_type(f"input[{i}]", "a string", text)
    fields = {"input": texts, "dimensions": request.dimensions or None}
    return _request(request, fields, model, options, ignored, truncate=request.truncate)


def read_embeddings(body: Any, model: ServedModel, options: RouterOptions) -> OllamaRequest:
    """The embedding request of POST /api/embeddings. Raises ``RequestError``."""
    ignored: set[str] = set()
    request = OllamaEmbeddingsRequest.read(body, ignored)
    fields = {"input": request.prompt, "normalize": False}
    return _request(request, fields, model, options, ignored, truncate=True)


class EmbedFormatter(EmbeddingFormatter):
    """Formats all vectors, and the time they took."""

    def __init__(self, request: OllamaRequest) -> None:
        super().__init__(request, created=0)  # not in this response
        self._model = request.requested_model
        self._start = time.monotonic_ns()

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        return {
            "model": self._model,
            "embeddings": self.vectors(result),
            "total_duration": time.monotonic_ns() - self._start,
            "load_duration": 0,
            "prompt_eval_count": result.usage.prompt_tokens,
        }


class OlderEmbeddingFormatter(EmbeddingFormatter):
    """Formats the single vector of the older route."""

    def __init__(self, request: OllamaRequest) -> None:
        super().__init__(request, created=0)

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        return {"embedding": self.vectors(result)[0]}


def _request(
    request: OllamaBody, fields: dict[str, Any], model: ServedModel, options: RouterOptions,
    ignored: set[str], *, truncate: bool,
) -> OllamaRequest:  # fmt: skip
    limited = request.read_options(model, ignored).limited(model)
    with errors_of_ollama(limited):
        if truncate:  # with the model's own limit, so that no text is too long
            truncation = {"truncate_prompt_tokens": limited.max_model_len}
            parsed = parse_embedding(fields | truncation, model, options)
        else:
            parsed = parse_embedding(fields, limited, options)
    return OllamaRequest.of(parsed, request, model, ignored)
