"""Hidden states of prompts for the Python API: requests, and vectors from what ranks returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from ...errors import RequestError
from ...text.tokenizer import Tokenizer
from ..sequence import Pooling
from ..sequence import Sequence as EngineSequence
from .prompts import check_list, token_ids
from .types import Embedding, Prompt

POOLINGS: tuple[str, ...] = get_args(Pooling)
# One step returns at most one vector for each running sequence.
MAX_HIDDEN_BYTES = 64 << 20
# Below this length a vector is divided by it instead of its own length, as torch's normalize does.
_SHORTEST = 1e-12


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A tokenized prompt, and the form of its vector. ``normalize``: of length 1."""

    tokens: list[int]
    pooling: Pooling
    normalize: bool


def embedding_requests(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], pooling: Pooling, *, normalize: bool
) -> list[EmbeddingRequest]:
    """Raises ``RequestError``."""
    check_list(prompts)
    if pooling not in POOLINGS:
        raise RequestError(
            f"pooling is {pooling!r}; it must be one of {', '.join(POOLINGS)}", param="pooling"
        )
    return [EmbeddingRequest(token_ids(tokenizer, one), pooling, normalize) for one in prompts]


def check_result_size(max_num_seqs: int, hidden_size: int) -> None:
    """Raise ``RequestError`` if a step's vectors could be too large for a rank's message."""
    limit = MAX_HIDDEN_BYTES // (np.float32().nbytes * hidden_size)
    if max_num_seqs > limit:
        raise RequestError(
            f"vectors of {hidden_size} numbers need --max-num-seqs of at most {limit}, and it is "
            f"{max_num_seqs}"
        )


def embedding_of(sequence: EngineSequence, *, normalize: bool) -> Embedding:
    """The vector of a sequence that has been computed, with its tokens."""
    return Embedding(
        values=[float(value) for value in vector_of(sequence, normalize=normalize)],
        prompt_tokens=len(sequence.prompt),
        cached_tokens=sequence.cached,
    )


def vector_of(
    sequence: EngineSequence, *, normalize: bool, dimensions: int | None = None
) -> NDArray[np.float64]:
    """The vector of a sequence that has been computed: its first ``dimensions`` numbers, or all."""
    parts = [np.frombuffer(part, dtype=np.float32) for part in sequence.hidden]
    vector: NDArray[np.float64] = np.stack(parts).sum(axis=0, dtype=np.float64)
    if sequence.pooling == "mean":
        vector /= len(sequence.prompt)
    vector = vector[:dimensions]
    if normalize:
        vector /= max(float(np.linalg.norm(vector)), _SHORTEST)
    return vector
