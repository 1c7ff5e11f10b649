"""POST /v1/score and /v1/rerank: from a body to a ``GenerationRequest`` that computes scores.

A cross-encoder reads each pair of texts as one prompt, in its template if it has one. Of a model
for embeddings, each text is a prompt, and a score is the cosine of the angle between two vectors.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ...proto import tandem_pb2 as pb
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
# Names that rerankers of images have for what is no text.
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
        """Of each text; the longer one of a pair is cut first."""
        return "right"


class ScoreBody(PairsBody):
    """The body of POST /v1/score: two texts, one and several, or as many of both. They have one of
    several pairs of names."""

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
    """The body of POST /v1/rerank. With ``top_n`` 0, all documents are returned."""

    query: Annotated[Any, DocumentedAs(str | TextObject)]
    documents: Annotated[Any, DocumentedAs(list[str | TextObject])]
    top_n: Annotated[int, Field(ge=0, le=INT32 - 1), WHOLE] = 0
    return_documents: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(GenerationRequest):
    """``pairs`` has the numbers of the two prompts of each score, or is ``None`` if each prompt has
    its own."""

    pairs: Sequence[tuple[int, int]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest(ScoreRequest):
    """``documents`` are those to be returned with the best ``top_n`` scores, if they are."""

    documents: list[str] | None
    top_n: int


def parse_score(body: Any, model: ServedModel, options: RouterOptions) -> ScoreRequest:
    """Check a body, tokenize its texts. Raises ``RequestError`` or ``ApiError``."""
    ignored: set[str] = set()
    asked = ScoreBody.read(body, ignored)
    model.check_name(asked.model)
    names = _names(asked)
    firsts, seconds = (_texts(getattr(asked, name), name) for name in names)
    if len(firsts) not in (1, len(seconds)):
        raise invalid(
            f"'{names[0]}' has {len(firsts)} texts and '{names[1]}' {len(seconds)}; give one and "
            "any number, or as many of both.",
            names[0],
        )
    prefixes = (model.tokenizer.prompts.default,) * 2
    fields = _fields("score", asked, firsts, seconds, names, prefixes, model, options)
    return ScoreRequest(**fields, ignored=ignored)


def parse_rerank(body: Any, model: ServedModel, options: RouterOptions) -> RerankRequest:
    """Check a body, tokenize its texts. Raises ``RequestError`` or ``ApiError``."""
    ignored: set[str] = set()
    asked = RerankBody.read(body, ignored)
    model.check_name(asked.model)
    query = _text(asked.query, "query")
    if not isinstance(asked.documents, list):
        raise wrong_type("documents", "an array", asked.documents)
    documents = _texts(asked.documents, "documents")
    names = ("query", "documents")
    prompts = model.tokenizer.prompts
    prefixes = (prompts.first_of(QUERY), prompts.first_of(DOCUMENT))
    fields = _fields("rerank", asked, [query], documents, names, prefixes, model, options)
    return RerankRequest(
        **fields,
        ignored=ignored,
        documents=documents if asked.return_documents else None,
        top_n=asked.top_n or len(documents),
    )


def _names(asked: ScoreBody) -> tuple[str, str]:
    """The names by which the body has its texts."""
    for names in NAMES:
        if all(getattr(asked, name) is not None for name in names):
            return names
    known = " or ".join(f"'{one}' and '{other}'" for one, other in NAMES)
    missing = next((b for a, b in NAMES if getattr(asked, a) is not None), NAMES[0][0])
    raise invalid(f"Give two texts, as {known}.", missing, "missing_required_parameter")


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
    """A text, which may be that of an object. Raises ``RequestError`` for an image beside it."""
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
    for place, each in places.items():
        for key in _MEDIA if isinstance(each, dict) else ():
            if each.get(key) is not None:
                name = f"{place}.{key}"
                raise invalid(f"Invalid '{name}': only texts are scored; leave it out.", name)


def _fields(
    kind: str,
    asked: PairsBody,
    firsts: list[str],
    seconds: list[str],
    names: tuple[str, str],
    prefixes: tuple[str, str],
    model: ServedModel,
    options: RouterOptions,
) -> dict[str, Any]:
    """The fields of a request for the scores of pairs. A model for embeddings reads ``prefixes``
    before the texts."""
    cut = read_truncation(asked, max_prompt_tokens(model, 0))
    together = model.scoring == "pair"
    _check_scores(asked, model, options)
    if together:
        pairs = None
        several = firsts * (len(seconds) // len(firsts))
        prompts = [
            _pair(first, second, cut, model, names, asked.instruction)
            for first, second in zip(several, seconds, strict=True)
        ]
    else:
        pairs = [(i % len(firsts), len(firsts) + i) for i in range(len(seconds))]
        prompts = [
            EncodedPrompt(new_tokens(_encoded(prefix + text, cut, model, name)))
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
        "priority": asked.priority,
        "cache_salt": asked.cache_salt,
        "embed": VectorOptions(
            pooling=None if together else options.pooling,
            normalize=asked.use_activation if together else True,
            score=together,
        ),
        "pairs": pairs,
    }


def _check_scores(asked: PairsBody, model: ServedModel, options: RouterOptions) -> None:
    """Raise ``RequestError`` for a model that does not score pairs: whose classifier has several
    labels, or whose vectors mean nothing. An operator that sets ``--pooling`` says that they mean
    something."""
    if model.scoring == "pair":
        return
    if model.scoring == "labels":
        raise invalid(
            f"The model '{model.name}' has a classifier of {len(model.labels)} labels, which "
            f"scores no pairs of texts; use /classify.",
            "model",
            "model_cannot_score",
        )
    if asked.instruction:
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
    cut: Truncation | None,
    model: ServedModel,
    names: tuple[str, str],
    instruction: str | None,
) -> EncodedPrompt:
    limit = None if cut is None else cut.tokens
    tokens, second_text = encode_pair(
        first, second, model, param=names[1], limit=limit, instruction=instruction
    )
    _check(tokens, model, names[1])
    return EncodedPrompt(new_tokens(tokens), second_text=second_text)


def _encoded(text: str, cut: Truncation | None, model: ServedModel, param: str) -> list[int]:
    tokens = encode_one(text, model, cut, param=param)
    _check(tokens, model, param)
    return tokens


def _check(tokens: list[int], model: ServedModel, param: str) -> None:
    if not tokens:
        raise invalid(f"Invalid '{param}': the text is empty.", param, "empty_string")
    check_context([len(tokens)], 0, model, param=param, default=1)
