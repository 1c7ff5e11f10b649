"""From one request to its sequences: ranges checked, seeds resolved, choices numbered."""

from __future__ import annotations

import secrets
from hashlib import blake2b

from ..errors import RequestError
from .core import EngineCore
from .plan import SamplingParams
from .sequence import Sequence

MAX_CHOICES = 128
MAX_LOGPROBS = 64

# name: lowest, highest (inclusive); where these are whole numbers, the value must be one.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "top_k": (0, 1 << 31),
    "n": (1, MAX_CHOICES),
    "max_tokens": (1, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "seed": (-(1 << 63), (1 << 63) - 1),
}
_MAY_BE_NONE = frozenset({"logprobs", "prompt_logprobs", "seed"})
# OpenAI's. One that is not bounded could make every probability NaN, and no token would be drawn.
_BIAS_RANGE = (-100.0, 100.0)


def check_params(params: SamplingParams) -> None:
    """Raise ``RequestError`` naming the parameter, its value and its range.

    Types too: Python gives any, and what a rank cannot compute with ends the rank.
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
    for name in ("logit_bias", "stop_token_ids"):
        if not all(isinstance(token, int) for token in getattr(params, name)):
            raise RequestError(f"{name} has a token id that is not an integer", param=name)


def _check_number(name: str, value: object, limits: tuple[float, float], *, param: str) -> None:
    lowest, highest = limits
    kinds = int if isinstance(lowest, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not lowest <= value <= highest:
        kind = "an integer" if kinds is int else "a number"
        raise RequestError(
            f"{name} is {value!r}; it must be {kind} between {lowest} and {highest}", param=param
        )


def build_sequences(
    core: EngineCore,
    prompt: list[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    priority: int = 0,
    salt: str = "",
) -> list[Sequence]:
    """The n choices of a request; the first leads, the others share its prompt."""
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    for name, ids in (
        ("prompt", prompt),
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise RequestError(
                f"{name} has a token id outside of the vocabulary of {vocab_size}", param=name
            )
    seed = params.seed if params.seed is not None else secrets.randbits(63)
    sequences = [
        Sequence(
            core.new_id(),
            prompt,
            params,
            seed=choice_seed(seed, index),
            index=index,
            priority=priority,
            salt=salt,
        )
        for index in range(params.n)
    ]
    sequences[0].siblings = sequences[1:]
    return sequences


def choice_seed(seed: int, index: int) -> int:
    """A 64-bit seed for each choice; the same request gives the same choices on any node."""
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
