"""Builds the sequences of a request: checks token ids, resolves seeds, numbers choices."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Tokens
from hashlib import blake2b

from ..errors import RequestError
from .core import EngineCore
from .sampling_params import SamplingParams
from .sequence import Sequence
from .structured.constraint import OutputRules
from .work import Generate, Pool


def build_sequences(
    core: EngineCore,
    prompt: list[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    priority: int = 0,
    salt: str = "",
    rules: OutputRules | None = None,
    eos_token_ids: Iterable[int] = (),
    resume: Mapping[int, Tokens[int]] | None = None,
) -> list[Sequence]:
    """The n choices of a request; the first leads, the others share its prompt.

    They follow ``rules``, and end with ``eos_token_ids``. ``resume`` has the outputs so far of the
    choices that another node has begun; missing choices have ended. Raises ``RequestError``.
    """
    mid_stream = resume is not None
    resume = dict.fromkeys(range(params.n), ()) if resume is None else resume
    _check_prompt(prompt, vocab_size)
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
        ("bad_words", [token for word in params.bad_words for token in word]),
        ("resume", [token for tokens in resume.values() for token in tokens]),
    ):
        _check_tokens(name, ids, vocab_size)
    seed = params.seed if params.seed is not None else secrets.randbits(63)
    ends = {*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids}
    sequences = [
        Sequence(
            core.new_id(),
            prompt,
            Generate(
                params,
                choice_seed(seed, index),
                None if rules is None else rules.constraint(ends),
            ),
            index=index,
            priority=priority,
            salt=salt,
            mid_stream=mid_stream,
            outputs=list(tokens),
            resumed=len(tokens),
        )
        for index, tokens in sorted(resume.items())
    ]
    sequences[0].siblings = sequences[1:]
    return sequences


def pooling_sequence(
    core: EngineCore,
    prompt: list[int],
    work: Pool,
    *,
    vocab_size: int,
    priority: int = 0,
    salt: str = "",
) -> Sequence:
    """The sequence of a prompt to embed or to classify. Raises ``RequestError``."""
    _check_prompt(prompt, vocab_size)
    return Sequence(core.new_id(), prompt, work, priority=priority, salt=salt)


def _check_prompt(prompt: list[int], vocab_size: int) -> None:
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    _check_tokens("prompt", prompt, vocab_size)


def _check_tokens(name: str, ids: Collection[int], vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RequestError(
            f"{name} has a token id outside the vocabulary of {vocab_size}", param=name
        )


def choice_seed(seed: int, index: int) -> int:
    """A 64-bit seed for each choice; the same request gives the same choices on any node."""
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
