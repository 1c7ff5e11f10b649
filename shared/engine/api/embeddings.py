"""Vectors and scores of prompts for the Python API: requests and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import RequestError
from ...models.spec import POOLINGS, Pooling, ScoreActivation, Scorer
from ...text.tokenizer import Tokenizer, max_tokens_before_cut
from ..hidden_states import scores_of, vector_of
from ..sequence import Sequence as EngineSequence
from .prompts import check_list, token_ids
from .types import Classification, Embedding, Prompt, Score


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """A tokenized prompt to embed or to classify. ``second_text``: see ``Pool``."""

    tokens: list[int]
    pooling: Pooling
    classify: bool = False
    second_text: int = 0


def embedding_requests(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], pooling: str, cut: int | None
) -> list[PoolingRequest]:
    """Requests for the vectors of prompts, each ``cut`` to this many tokens if not ``None``. Raises
    ``RequestError``."""
    check_list(prompts)
    if pooling not in POOLINGS:
        raise RequestError(
            f"pooling is {pooling!r}; it must be one of {', '.join(POOLINGS)}", param="pooling"
        )
    return [PoolingRequest(_within(tokenizer, one, cut), pooling) for one in prompts]


def classification_requests(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], scorer: Scorer, cut: int | None
) -> list[PoolingRequest]:
    """Requests for the labels of prompts; ``cut`` as in ``embedding_requests``. Raises
    ``RequestError``."""
    check_list(prompts)
    return [PoolingRequest(_within(tokenizer, one, cut), scorer.pooling, True) for one in prompts]


def _within(tokenizer: Tokenizer, prompt: Prompt, cut: int | None) -> list[int]:
    """The first tokens of a prompt; a text keeps the special tokens around it."""
    if cut is None:
        return token_ids(tokenizer, prompt)
    if isinstance(prompt, str):
        return tokenizer.encode_within(prompt, cut, max_tokens=max_tokens_before_cut(cut))
    return token_ids(tokenizer, prompt)[:cut]


def text_pairs(firsts: str | Sequence[str], seconds: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of one text with each of many, or of two equally long lists. Raises
    ``RequestError``."""
    one, other = ([each] if isinstance(each, str) else list(each) for each in (firsts, seconds))
    if not all(isinstance(text, str) for text in (*one, *other)):
        raise RequestError("texts to score must be strings", param="texts_2")
    if len(one) not in (1, len(other)) or not other:
        raise RequestError(
            f"there are {len(one)} first texts and {len(other)} second ones; give one and any "
            f"number, or equally many of both",
            param="texts_1",
        )
    return list(zip(one * (len(other) // len(one)), other, strict=True))


def embedding_of(sequence: EngineSequence, *, normalize: bool) -> Embedding:
    """The vector of a computed sequence, with its counts of tokens."""
    return Embedding(
        values=[float(value) for value in vector_of(sequence, normalize=normalize)],
        prompt_tokens=len(sequence.prompt),
        cached_tokens=sequence.cached,
    )


def score_of(sequence: EngineSequence, activation: ScoreActivation) -> Score:
    """The score of a computed pair, by a classifier of one label."""
    [value] = scores_of(sequence, activation).tolist()
    return Score(value=value, prompt_tokens=len(sequence.prompt), cached_tokens=sequence.cached)


def cosine(first: Embedding, second: Embedding) -> Score:
    """The cosine of two vectors of length 1, as a score."""
    return Score(
        value=sum(a * b for a, b in zip(first.values, second.values, strict=True)),
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        cached_tokens=first.cached_tokens + second.cached_tokens,
    )


def classification_of(sequence: EngineSequence, scorer: Scorer) -> Classification:
    """The scores of a computed text, and its best label."""
    scores = scores_of(sequence, scorer.activation)
    return Classification(
        label=scorer.labels[int(scores.argmax())],
        probs=scores.tolist(),
        prompt_tokens=len(sequence.prompt),
        cached_tokens=sequence.cached,
    )
