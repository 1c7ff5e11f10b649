"""Vectors of prompts for the Python API: requests and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import RequestError
from ...models.spec import POOLINGS, Pooling
from ...text.tokenizer import Tokenizer
from ..hidden_states import vector_of
from ..sequence import Sequence as EngineSequence
from .prompts import check_list, token_ids
from .types import Embedding, Prompt


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A tokenized prompt, and the form of its vector. ``normalize``: of length 1."""

    tokens: list[int]
    pooling: Pooling
    normalize: bool


def embedding_requests(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], pooling: str, *, normalize: bool
) -> list[EmbeddingRequest]:
    """Raises ``RequestError``."""
    check_list(prompts)
    if pooling not in POOLINGS:
        raise RequestError(
            f"pooling is {pooling!r}; it must be one of {', '.join(POOLINGS)}", param="pooling"
        )
    return [EmbeddingRequest(token_ids(tokenizer, one), pooling, normalize) for one in prompts]


def embedding_of(sequence: EngineSequence, *, normalize: bool) -> Embedding:
    """The vector of a sequence that has been computed, with its tokens."""
    return Embedding(
        values=[float(value) for value in vector_of(sequence, normalize=normalize)],
        prompt_tokens=len(sequence.prompt),
        cached_tokens=sequence.cached,
    )
