"""Vectors and scores of prompts, computed from the hidden states that ranks return."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..models.spec import ScoreActivation
from .sequence import Sequence
from .work import Pool

# One step returns at most one vector for each running sequence.
MAX_HIDDEN_BYTES = 64 << 20
# The lowest divisor of a vector, as in torch's normalize.
_SHORTEST = 1e-12


def check_result_size(max_num_seqs: int, hidden_size: int) -> None:
    """Raise ``RequestError`` if a step's vectors could be too large for a rank's message."""
    limit = MAX_HIDDEN_BYTES // (np.float32().nbytes * hidden_size)
    if max_num_seqs > limit:
        raise RequestError(
            f"vectors of {hidden_size} numbers need --max-num-seqs of at most {limit}, and it is "
            f"{max_num_seqs}"
        )


def vector_of(
    sequence: Sequence, *, normalize: bool, dimensions: int | None = None
) -> NDArray[np.float64]:
    """The first ``dimensions`` numbers of a computed sequence's vector, or all."""
    parts = [np.frombuffer(part, dtype=np.float32) for part in sequence.hidden]
    vector: NDArray[np.float64] = np.stack(parts).sum(axis=0, dtype=np.float64)
    if isinstance(sequence.work, Pool) and sequence.work.pooling == "mean":
        vector /= len(sequence.prompt)
    vector = vector[:dimensions]
    if normalize:
        vector /= max(float(np.linalg.norm(vector)), _SHORTEST)
    return vector


def scores_of(sequence: Sequence, activation: ScoreActivation) -> NDArray[np.float64]:
    """The scores of a classified text, one for each label: its logits after ``activation``."""
    [part] = sequence.hidden
    scores: NDArray[np.float64] = np.frombuffer(part, dtype=np.float32).astype(np.float64)
    match activation:
        case "sigmoid":
            # 1 / (1 + exp(-x)) would overflow far below zero.
            scores = 0.5 * (1.0 + np.tanh(0.5 * scores))
        case "softmax":
            scores = np.exp(scores - scores.max())
            scores /= scores.sum()
    return scores
