"""From one request to its sequences: ranges checked, seeds resolved, choices numbered."""

from __future__ import annotations

import math
import secrets
from hashlib import blake2b

from ..errors import RequestError
from .core import EngineCore
from .plan import SamplingParams
from .sequence import Sequence

MAX_CHOICES = 128
MAX_LOGPROBS = 64

# name: lowest, highest (inclusive)
_RANGES = {
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


def check_params(params: SamplingParams) -> None:
    """Raise ``RequestError`` naming the parameter, its value and its range."""
    for name, (lowest, highest) in _RANGES.items():
        value = getattr(params, name)
        if value is not None and not (math.isfinite(value) and lowest <= value <= highest):
            raise RequestError(
                f"{name} is {value}; it must be between {lowest} and {highest}", param=name
            )
    if params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens ({params.min_tokens}) is over max_tokens ({params.max_tokens})",
            param="min_tokens",
        )
    if not all(math.isfinite(bias) for bias in params.logit_bias.values()):
        raise RequestError("logit_bias has a value that is not finite", param="logit_bias")


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
