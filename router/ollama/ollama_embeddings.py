"""POST /api/embed and /api/embeddings: vectors of texts."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ..embeddings.embedding_response import EmbeddingResponse
from ..embeddings.text_inputs import MAX_INPUTS, pooling_request
from ..errors import invalid
from ..generation import EncodedPrompt, GenerationRequest, VectorOptions, new_tokens
from ..options import RouterOptions
from ..requests.body_errors import wrong_type
from ..requests.body_model import INT32, WHOLE, AnswerModel, BodyModel, DocumentedAs
from ..requests.context import encode_one, encode_text
from ..requests.truncation import Truncation
from ..result import GenerationResult
from ..served_model import ServedModel
from ..surface import Surface
from .loaded_time import check_keep_alive
from .ollama_options import OllamaOptions
from .ollama_prompt import check_input, context_of
from .ollama_request import check_name


class OllamaVectorBody(BodyModel):
    """The fields of both routes."""

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    options: Annotated[dict[str, Any], DocumentedAs(OllamaOptions)] = Field(default_factory=dict)
    keep_alive: Annotated[Any, DocumentedAs(str | float)] = None


class OllamaEmbedRequest(OllamaVectorBody):
    """The body of POST /api/embed. Texts that are too long are cut, unless ``truncate`` is
    false."""

    input: Annotated[Any, DocumentedAs(str | list[str])]
    truncate: bool = True
    dimensions: Annotated[int, Field(ge=0, le=INT32 - 1), WHOLE] = 0


class OllamaEmbeddingsRequest(OllamaVectorBody):
    """The body of POST /api/embeddings, the older route; its vectors have any length."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"images": ([],)}

    prompt: Annotated[str, Field(min_length=1)]


class OllamaEmbedAnswer(AnswerModel):
    """The answer of POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(AnswerModel):
    """The answer of POST /api/embeddings."""

    embedding: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaVectorRequest(GenerationRequest):
    """A request with the name by which the client called the model."""

    asked_model: str


class OllamaEmbed(Surface):
    """POST /api/embed."""

    path = "/api/embed"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        ignored: set[str] = set()
        asked = OllamaEmbedRequest.read(body, ignored)
        texts = asked.input if isinstance(asked.input, list) else [asked.input]
        if not 0 < len(texts) <= MAX_INPUTS:
            raise invalid(f"'input' must have 1 to {MAX_INPUTS} texts, not {len(texts)}", "input")
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise wrong_type(f"input[{i}]", "a string", text)
        vector = VectorOptions(
            pooling=options.pooling, normalize=True, dimensions=asked.dimensions, in_base64=False
        )
        return _request(asked, texts, asked.truncate, vector, model, ignored)

    def response(self, request: GenerationRequest, created: int) -> EmbedResponse:
        return EmbedResponse(request, created)


class OllamaEmbeddings(Surface):
    """POST /api/embeddings."""

    path = "/api/embeddings"

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        ignored: set[str] = set()
        asked = OllamaEmbeddingsRequest.read(body, ignored)
        vector = VectorOptions(
            pooling=options.pooling, normalize=False, dimensions=0, in_base64=False
        )
        return _request(asked, [asked.prompt], True, vector, model, ignored)

    def response(self, request: GenerationRequest, created: int) -> OlderEmbeddingResponse:
        return OlderEmbeddingResponse(request, created)


class EmbedResponse(EmbeddingResponse):
    """All vectors, and how long they took."""

    def __init__(self, request: GenerationRequest, created: int) -> None:
        super().__init__(request, created)
        assert isinstance(request, OllamaVectorRequest), "made by parse"
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


class OlderEmbeddingResponse(EmbeddingResponse):
    """The one vector."""

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        return {"embedding": self.vectors(result)[0]}


def _request(
    asked: OllamaVectorBody, texts: list[str], truncate: bool, vector: VectorOptions,
    model: ServedModel, ignored: set[str],
) -> OllamaVectorRequest:  # fmt: skip
    check_name(asked.model, model)
    check_keep_alive(asked.keep_alive)
    given = OllamaOptions.read(asked.options, ignored, "options.", at="options")
    limit = context_of(given, model)
    prompts = [EncodedPrompt(_tokens(text, limit, truncate, model)) for text in texts]
    return pooling_request(
        OllamaVectorRequest,
        "ollama",
        model,
        prompts,
        vector,
        ignored=ignored,
        asked_model=asked.model,
    )


def _tokens(text: str, limit: int, truncate: bool, model: ServedModel) -> array[int]:
    prompt = model.tokenizer.prompts.default
    tokens = []
    if text and truncate:
        tokens = encode_one(prompt + text, model, Truncation(limit, left=False), param="input")
    elif text:
        tokens = encode_text(prompt + text, model, param="input")
    if not tokens:
        raise invalid("the input must not be empty", "input", "empty_string")
    check_input(tokens, limit)
    return new_tokens(tokens)
