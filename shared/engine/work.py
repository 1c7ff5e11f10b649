"""What a sequence is there for: to generate, to have KV computed, or to become a vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..models.spec import Pooling
from .sampling_params import SamplingParams
from .structured.constraint import Constraint


@dataclass(frozen=True, slots=True)
class Generate:
    """Draw tokens after the prompt, as ``params`` say.

    ``seed`` is a 64-bit number. ``constraint`` is the grammar that the outputs follow.
    """

    private: ClassVar[bool] = False

    params: SamplingParams
    seed: int = 0
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the prompt's KV up to token ``until``, and keep its blocks until they are released.

    A ``private`` sequence takes no block from the prefix index and enters none into it. It goes
    before all others, so it must be short.
    """

    until: int
    private: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    """Compute the whole prompt, and return what its vector is made of: hidden states, or the
    classifier's logits if it is to ``classify``.

    ``second_text`` is the position at which the second segment of a pair of texts begins, if any.
    """

    private: ClassVar[bool] = False

    pooling: Pooling
    classify: bool = False
    second_text: int = 0


Work = Generate | Compute | Pool
