"""Sampling parameters of a request: their defaults and their ranges."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...proto.packed_logprobs import MAX_LOGPROBS
from ..config.sampling_fields import NUMBERS, SamplingNumbers
from ..errors import RequestError
from .structured.params import StructuredOutputs
from .structured.thinking_budget import ThinkingBudget

MAX_CHOICES = 128
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingNumbers):
    """Sampling and stop parameters of one request. Defaults are OpenAI's.

    Each of the numbers (``config/sampling_fields.py``) has no effect by default; ``temperature`` 0
    is greedy. Without ``allowed_token_ids`` any token may be drawn. ``logprobs`` is the number of
    alternatives to return with the chosen token (``None``: no logprobs at all); with
    ``logprob_token_ids`` these are returned instead. ``bad_words`` are sequences of tokens that the
    outputs must not contain. ``structured_outputs`` is a grammar that every output follows.
    ``thinking`` limits the tokens of the reasoning, which is closed after them.
    """

    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking: ThinkingBudget | None = None


# Lowest and highest value, inclusive; if these are integers, the value must be one.
#
# These are the engine's own limits for any caller: values that ranks can compute with. The router's
# HTTP surfaces also enforce their APIs' narrower limits (OpenAI: temperature at most 2), so that
# clients get that API's errors. Nodes check again because they do not trust routers.
_RANGES: dict[str, tuple[float, float]] = {
    **{name: number.computable for name, number in NUMBERS.items()},
    "n": (1, MAX_CHOICES),
    "max_tokens": (1, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "seed": (-(1 << 63), (1 << 63) - 1),
}
_MAY_BE_NONE = frozenset({"logprobs", "prompt_logprobs", "seed"})
# OpenAI's limits. An unbounded bias could make every probability NaN.
_BIAS_RANGE = (-100.0, 100.0)


def check_params(params: SamplingParams) -> None:
    """Raise ``RequestError`` naming the parameter, its value and its range.

    Types are checked too: Python callers may pass anything, and a value that a rank cannot compute
    with would end the rank.
    """
    for name, limits in _RANGES.items():
        value = getattr(params, name)
        if value is not None or name not in _MAY_BE_NONE:
            _check_number(name, value, limits, param=name)
    if params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens ({params.min_tokens}) is over max_tokens ({params.max_tokens})",
            param="min_tokens",
        )
    for token, bias in params.logit_bias.items():
        _check_number(f"logit_bias of token {token}", bias, _BIAS_RANGE, param="logit_bias")
    _check_bad_words(params.bad_words)
    if params.logprob_token_ids and params.logprobs is None:
        raise RequestError("logprob_token_ids needs logprobs", param="logprob_token_ids")
    if len(params.logprob_token_ids) > MAX_LOGPROBS:
        raise RequestError(
            f"logprob_token_ids has {len(params.logprob_token_ids)} tokens; the limit is "
            f"{MAX_LOGPROBS}",
            param="logprob_token_ids",
        )
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
        if not all(isinstance(token, int) for token in getattr(params, name)):
            raise RequestError(f"{name} has a token id that is not an integer", param=name)
    _check_structured_outputs(params.structured_outputs)
    _check_thinking(params.thinking)


def _check_structured_outputs(constraint: object) -> None:
    if isinstance(constraint, StructuredOutputs):
        constraint.key()
    elif constraint is not None:
        raise RequestError(
            f"structured_outputs is {constraint!r:.64}; it must be StructuredOutputs(...)",
            param="structured_outputs",
        )


def _check_thinking(budget: object) -> None:
    if isinstance(budget, ThinkingBudget):
        budget.check()
    elif budget is not None:
        message = f"thinking is {budget!r:.64}; it must be ThinkingBudget(...)"
        raise RequestError(message, param="thinking")


def _check_bad_words(words: tuple[tuple[int, ...], ...]) -> None:
    if len(words) > MAX_BAD_WORDS:
        message = f"bad_words has {len(words)} sequences of tokens; the limit is {MAX_BAD_WORDS}"
        raise RequestError(message, param="bad_words")
    for word in words:
        if not all(isinstance(token, int) for token in word):
            raise RequestError("bad_words has a token id that is not an integer", param="bad_words")
        if not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
            message = (
                f"bad_words: each must have 1 to {MAX_BAD_WORD_TOKENS} tokens, not {len(word)}"
            )
            raise RequestError(message, param="bad_words")


def _check_number(name: str, value: object, limits: tuple[float, float], *, param: str) -> None:
    lowest, highest = limits
    kinds = int if isinstance(lowest, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not lowest <= value <= highest:
        kind = "an integer" if kinds is int else "a number"
        raise RequestError(
            f"{name} is {value!r}; it must be {kind} between {lowest} and {highest}", param=param
        )
