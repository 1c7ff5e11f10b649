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
    """The body of POST /api/embed. Texts that are too long are cut, unless ``truncate`` is
    false."""

    input: Annotated[Any, DocumentedAs(str | list[str])]
    truncate: bool = True
    dimensions: Annotated[int, Field(ge=0, le=INT32 - 1), WHOLE] = 0


class OllamaEmbeddingsRequest(OllamaBody):
    """The body of POST /api/embeddings, the older route; its vectors have any length."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"images": ([],)}

    prompt: Annotated[str, Field(min_length=1)]


class OllamaEmbedResponse(ResponseModel):
    """The answer of POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsResponse(ResponseModel):
    """The answer of POST /api/embeddings."""

    embedding: list[float]


def read_embed(body: Any, model: ServedModel, options: RouterOptions) -> OllamaRequest:
    """The embeddings of POST /api/embed. Raises ``RequestError``."""
    ignored: set[str] = set()
    asked = OllamaEmbedRequest.read(body, ignored)
    texts = asked.input if isinstance(asked.input, list) else [asked.input]
    if not 0 < len(texts) <= MAX_INPUTS:
        raise invalid(f"'input' must have 1 to {MAX_INPUTS} texts, not {len(texts)}", "input")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise wrong_type(f"input[{i}]", "a string", text)
    fields = {"input": texts, "dimensions": asked.dimensions or None}
    return _request(asked, fields, model, options, ignored, cut=asked.truncate)


def read_embeddings(body: Any, model: ServedModel, options: RouterOptions) -> OllamaRequest:
    """The embedding of POST /api/embeddings. Raises ``RequestError``."""
    ignored: set[str] = set()
    asked = OllamaEmbeddingsRequest.read(body, ignored)
    fields = {"input": asked.prompt, "normalize": False}
    return _request(asked, fields, model, options, ignored, cut=True)


class EmbedFormatter(EmbeddingFormatter):
    """All vectors, and how long they took."""

    def __init__(self, request: OllamaRequest) -> None:
        super().__init__(request, created=0)  # which such an answer does not have
        self._model = request.asked_model
        self._begun = time.monotonic_ns()

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        return {
            "model": self._model,
            "embeddings": self.vectors(result),
            "total_duration": time.monotonic_ns() - self._begun,
            "load_duration": 0,
            "prompt_eval_count": result.usage.prompt_tokens,
        }


class OlderEmbeddingFormatter(EmbeddingFormatter):
    """The one vector."""

    def __init__(self, request: OllamaRequest) -> None:
        super().__init__(request, created=0)

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        return {"embedding": self.vectors(result)[0]}


def _request(
    asked: OllamaBody, fields: dict[str, Any], model: ServedModel, options: RouterOptions,
    ignored: set[str], *, cut: bool,
) -> OllamaRequest:  # fmt: skip
    limited = asked.read_options(model, ignored).limited(model)
    with errors_of_ollama(limited):
        if cut:  # of a text of any length that the model itself takes
            cutting = {"truncate_prompt_tokens": limited.max_model_len}
            parsed = parse_embedding(fields | cutting, model, options)
        else:
            parsed = parse_embedding(fields, limited, options)
    return OllamaRequest.of(parsed, asked, model, ignored)
