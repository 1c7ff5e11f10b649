"""From one request to its sequences: ranges checked, seeds resolved, choices numbered."""

from __future__ import annotations

import secrets
import sys
from hashlib import blake2b

from ..errors import RequestError
from .core import EngineCore
from .plan import SamplingParams
from .sequence import Sequence

MAX_CHOICES = 128
MAX_LOGPROBS = 64

# name: lowest, highest (inclusive); whole numbers where the limits are
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
_OPTIONAL = ("logprobs", "prompt_logprobs", "seed")


def check_params(params: SamplingParams) -> None:
    """Raise ``RequestError`` naming the parameter, its value and its range.

    Types too: Python gives any, and what a rank cannot compute with ends the rank.
    """
    for name, (lowest, highest) in _RANGES.items():
        value = getattr(params, name)
        if value is None and name in _OPTIONAL:
            continue
        if not _is_within(value, lowest, highest):
            whole = "a whole number " if isinstance(lowest, int) else ""
            raise RequestError(
                f"{name} is {value!r}; it must be {whole}between {lowest} and {highest}",
                param=name,
            )
    if params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens ({params.min_tokens}) is over max_tokens ({params.max_tokens})",
            param="min_tokens",
        )
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if not all(isinstance(token, int) for token in ids):
            raise RequestError(f"{name} must name tokens by their ids, not {ids!r}", param=name)
    largest = sys.float_info.max
    if not all(_is_within(bias, -largest, largest) for bias in params.logit_bias.values()):
        raise RequestError("logit_bias has a value that is not finite", param="logit_bias")


def _is_within(value: object, lowest: float, highest: float) -> bool:
    """A number in the range, which NaN never is, and a whole one if the range is."""
    kinds = int if isinstance(lowest, int) else (int, float)
    return isinstance(value, kinds) and lowest <= value <= highest


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
