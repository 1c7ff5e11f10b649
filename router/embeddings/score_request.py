"""POST /v1/score and /v1/rerank: from a body to a ``GenerationRequest`` that computes scores.

A cross-encoder reads each pair of texts as one prompt, in its template if it has one. With an
embedding model each text is a prompt, and a score is the cosine similarity of two vectors.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ...proto import tandem_pb2 as pb
from ...shared.scoring import ROUTES
from ...shared.text.prompts import DOCUMENT, QUERY
from ..errors import invalid
from ..generation import EncodedPrompt, GenerationRequest, TextOptions, VectorOptions, new_tokens
from ..options import RouterOptions
from ..requests.body_errors import wrong_type
from ..requests.body_model import INT32, WHOLE, BodyModel, DocumentedAs
from ..requests.context import check_context, encode_one, encode_pair
from ..requests.truncation import Truncation, max_prompt_tokens, read_truncation
from ..served_model import ServedModel
from .text_inputs import MAX_INPUTS

_TEXTS = DocumentedAs(str | list[str])
# Keys that multimodal rerankers have for images and videos.
_MEDIA = ("image", "image_url", "video", "video_url")


class TextObject(BodyModel):
    """A text as an object."""

    text: str


class PairsBody(BodyModel):
    """The fields of all routes that score pairs of texts."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
        "mm_processor_kwargs": ({},),
        "rank_fields": ([], ["text"]),
    }

    model: Annotated[str, Field(max_length=1024)] = ""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32 - 1), WHOLE] | None = None
    use_activation: bool = True
    instruction: str | None = None
    priority: Annotated[int, Field(ge=-INT32, le=INT32 - 1), WHOLE] = 0
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    # Accepted without effect: OpenAI uses it for its own accounting.
    user: Any = None

    @property
    def truncation_side(self) -> str:
        """The side of each text to truncate; the longer text of a pair is truncated first."""
        return "right"


class ScoreBody(PairsBody):
    """The body of POST /v1/score: one text and any number of texts, or equally many of both, under
    one of several pairs of names."""

    text_1: Annotated[Any, _TEXTS] = None
    text_2: Annotated[Any, _TEXTS] = None
    queries: Annotated[Any, _TEXTS] = None
    documents: Annotated[Any, _TEXTS] = None
    items: Annotated[Any, _TEXTS] = None
    data_1: Annotated[Any, _TEXTS] = None
    data_2: Annotated[Any, _TEXTS] = None


NAMES = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)


class RerankBody(PairsBody):
    """The body of POST /v1/rerank. ``top_n`` 0 returns all documents."""

    query: Annotated[Any, DocumentedAs(str | TextObject)]
    documents: Annotated[Any, DocumentedAs(list[str | TextObject])]
    top_n: Annotated[int, Field(ge=0, le=INT32 - 1), WHOLE] = 0
    return_documents: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(GenerationRequest):
    """``pairs`` has the indices of the two prompts of each score; ``None`` if each prompt is a
    pair."""

    pairs: Sequence[tuple[int, int]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest(ScoreRequest):
    """``documents`` are the texts to return with the best ``top_n`` scores; ``None`` without
    texts."""

    documents: list[str] | None
    top_n: int


def parse_score(body: Any, model: ServedModel, options: RouterOptions) -> ScoreRequest:
    """Check a body and tokenize its texts. Raises ``RequestError`` or ``ApiError``."""
    ignored: set[str] = set()
    request = ScoreBody.read(body, ignored)
    model.check_name(request.model)
    names = _names(request)
    firsts, seconds = (_texts(getattr(request, name), name) for name in names)
    if len(firsts) not in (1, len(seconds)):
        raise invalid(
            f"'{names[0]}' has {len(firsts)} texts and '{names[1]}' {len(seconds)}; give one and "
            "any number, or as many of both.",
            names[0],
        )
    prefixes = (model.tokenizer.prompts.default,) * 2
    fields = _fields("score", request, firsts, seconds, names, prefixes, model, options)
    return ScoreRequest(**fields, ignored=ignored)


def parse_rerank(body: Any, model: ServedModel, options: RouterOptions) -> RerankRequest:
    """Check a body and tokenize its texts. Raises ``RequestError`` or ``ApiError``."""
    ignored: set[str] = set()
    request = RerankBody.read(body, ignored)
    model.check_name(request.model)
    query = _text(request.query, "query")
    if not isinstance(request.documents, list):
        raise wrong_type("documents", "an array", request.documents)
    documents = _texts(request.documents, "documents")
    names = ("query", "documents")
    prompts = model.tokenizer.prompts
    prefixes = (prompts.first_of(QUERY), prompts.first_of(DOCUMENT))
    fields = _fields("rerank", request, [query], documents, names, prefixes, model, options)
    return RerankRequest(
        **fields,
        ignored=ignored,
        documents=documents if request.return_documents else None,
        top_n=request.top_n or len(documents),
    )


def _names(request: ScoreBody) -> tuple[str, str]:
    """The names under which the body has its texts."""
    for names in NAMES:
        if all(getattr(request, name) is not None for name in names):
            return names
    choices = " or ".join(f"'{first}' and '{second}'" for first, second in NAMES)
    missing = next((b for a, b in NAMES if getattr(request, a) is not None), NAMES[0][0])
    raise invalid(f"Give two texts, as {choices}.", missing, "missing_required_parameter")


def _texts(value: Any, param: str) -> list[str]:
    if not isinstance(value, list):
        return [_text(value, param)]
    if not value:
        raise invalid(f"Invalid '{param}': empty array.", param, "empty_array")
    if len(value) > MAX_INPUTS:
        message = f"Invalid '{param}': {len(value)} texts, the limit is {MAX_INPUTS}."
        raise invalid(message, param, "array_above_max_length")
    return [_text(item, f"{param}[{i}]") for i, item in enumerate(value)]


def _text(value: Any, param: str) -> str:
    """A text, or the text of an object. Raises ``RequestError`` for media beside it."""
    _refuse_media(value, param)
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise wrong_type(param, "a string or an object with a 'text'", value)
    return text


def _refuse_media(value: Any, param: str) -> None:
    """Raise ``RequestError`` if an object has an image or a video, also in vLLM's list of parts."""
    parts = value.get("content") if isinstance(value, dict) else None
    places = {param: value} | {
        f"{param}.content[{number}]": part
        for number, part in enumerate(parts if isinstance(parts, list) else ())
    }
    for place, item in places.items():
        for key in _MEDIA if isinstance(item, dict) else ():
            if item.get(key) is not None:
                name = f"{place}.{key}"
                raise invalid(f"Invalid '{name}': only texts are scored; leave it out.", name)


def _fields(
    kind: str,
    request: PairsBody,
    firsts: list[str],
    seconds: list[str],
    names: tuple[str, str],
    prefixes: tuple[str, str],
    model: ServedModel,
    options: RouterOptions,
) -> dict[str, Any]:
    """The fields of a request that scores pairs. An embedding model reads ``prefixes`` before the
    texts."""
    truncation = read_truncation(request, max_prompt_tokens(model, 0))
    as_pairs = model.scoring == "pair"
    _check_scores(request, model, options)
    if as_pairs:
        pairs = None
        repeated = firsts * (len(seconds) // len(firsts))
        prompts = [
            _pair(first, second, truncation, model, names, request.instruction)
            for first, second in zip(repeated, seconds, strict=True)
        ]
    else:
        pairs = [(i % len(firsts), len(firsts) + i) for i in range(len(seconds))]
        prompts = [
            EncodedPrompt(new_tokens(_encoded(prefix + text, truncation, model, name)))
            for name, prefix, texts in zip(names, prefixes, (firsts, seconds), strict=True)
            for text in texts
        ]
    return {
        "request_id": f"{kind}-{uuid.uuid4().hex}",
        "model": model,
        "prompts": prompts,
        "max_tokens": [1] * len(prompts),
        "sampling": pb.Sampling(n=1),
        "text": TextOptions(),
        "stream": False,
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "embed": VectorOptions(
            pooling=None if as_pairs else options.pooling,
            normalize=request.use_activation if as_pairs else True,
            score=as_pairs,
        ),
        "pairs": pairs,
    }


def _check_scores(request: PairsBody, model: ServedModel, options: RouterOptions) -> None:
    """Raise ``RequestError`` for a model that does not score pairs: its classifier has several
    labels, or its vectors are not embeddings. ``--pooling`` declares that they are."""
    if model.scoring == "pair":
        return
    if model.scoring == "labels":
        raise invalid(
            f"The model '{model.name}' has a classifier of {len(model.labels)} labels, which "
            f"scores no pairs of texts; use {ROUTES['labels']}.",
            "model",
            "model_cannot_score",
        )
    if request.instruction:
        raise invalid(
            "Invalid 'instruction': this model scores by vectors, which take none.", "instruction"
        )
    if model.scoring != "vectors" and options.pooling is None:
        raise invalid(
            f"The model '{model.name}' does not score texts: it is neither a cross-encoder nor a "
            "model for embeddings. If it is one for embeddings, start the router with --pooling.",
            "model",
            "model_cannot_score",
        )


def _pair(
    first: str,
    second: str,
    truncation: Truncation | None,
    model: ServedModel,
    names: tuple[str, str],
    instruction: str | None,
) -> EncodedPrompt:
    limit = None if truncation is None else truncation.tokens
    tokens, second_text = encode_pair(
        first, second, model, param=names[1], limit=limit, instruction=instruction
    )
    _check(tokens, model, names[1])
    return EncodedPrompt(new_tokens(tokens), second_text=second_text)


def _encoded(text: str, truncation: Truncation | None, model: ServedModel, param: str) -> list[int]:
    tokens = encode_one(text, model, truncation, param=param)
    _check(tokens, model, param)
    return tokens


def _check(tokens: list[int], model: ServedModel, param: str) -> None:
    if not tokens:
        raise invalid(f"Invalid '{param}': the text is empty.", param, "empty_string")
    check_context([len(tokens)], 0, model, param=param, default=1)
