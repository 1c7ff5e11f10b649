"""The purpose of a sequence: to generate, to compute KV, or to embed or classify its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..models.spec import Pooling
from .sampling_params import SamplingParams
from .structured.constraint import Constraint


@dataclass(frozen=True, slots=True)
class Generate:
    """Draw tokens after the prompt, by ``params``.

    ``seed`` is a 64-bit number. ``constraint`` is the grammar that the outputs follow.
    """

    private: ClassVar[bool] = False

    params: SamplingParams
    seed: int = 0
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the prompt's KV up to token ``until``, and keep its blocks until they are released.

    A ``private`` sequence neither reads nor extends the prefix index. It goes before all others, so
    it must be short.
    """

    until: int
    private: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    """Compute the whole prompt, and return its pooled hidden states, or with ``classify`` the
    classifier's logits.

    ``second_text`` is the position at which the second segment of a pair of texts begins, if any.
    """

    private: ClassVar[bool] = False

    pooling: Pooling
    classify: bool = False
    second_text: int = 0


Work = Generate | Compute | Pool
