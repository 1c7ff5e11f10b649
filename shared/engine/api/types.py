"""Types of the Python API's prompts and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plan import PositionLogprobs


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


Messages = Sequence[Message | Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New output of one choice. ``finish_reason`` ("stop" or "length") is set on the last one.

    ``stop_reason`` is the stop string or the stop token id that ended the choice, if one did.
    """

    index: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One whole choice. ``tokens`` includes the stop token, which adds no text."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[PositionLogprobs]
    finish_reason: str
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[PositionLogprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well two texts match."""

    value: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """A score of one text for each label of the model, and the label with the best one."""

    label: str
    probs: list[float]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The vector of one prompt: a hidden state, or its projection."""

    values: list[float]
    prompt_tokens: int
    cached_tokens: int
