"""Any parameters of the GPU's sampler together, against the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.shared.engine.plan import RankSampling, SamplerSpec

pytest.importorskip("triton")

from tandem.tests.shared.engine.rank.test_gpu_sampler import SMALL, blocks, compare


def rarely(strategy: st.SearchStrategy[Any], otherwise: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(otherwise), st.just(otherwise), strategy)


@st.composite
def specs_of(draw: st.DrawFn, number: int, vocab_size: int) -> SamplerSpec:
    """Any parameters, for tokens of a vocabulary."""
    token = st.integers(0, vocab_size - 1)
    tokens = st.lists(token, max_size=9)
    few = st.lists(token, min_size=1, max_size=9, unique=True)
    word = st.lists(token, min_size=1, max_size=3).map(tuple)
    params = RankSampling(
        temperature=draw(st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.7, 100.0])),
        top_k=draw(rarely(st.integers(0, vocab_size + 2), 0)),
        top_p=draw(rarely(st.floats(0, 1), 1.0)),
        min_p=draw(rarely(st.floats(0, 1), 0.0)),
        repetition_penalty=draw(rarely(st.floats(0.01, 100), 1.0)),
        presence_penalty=draw(rarely(st.floats(-2, 2), 0.0)),
        frequency_penalty=draw(rarely(st.floats(-2, 2), 0.0)),
        logit_bias=draw(rarely(st.dictionaries(token, st.floats(-100, 100)), {})),
        allowed_token_ids=draw(rarely(few.map(tuple), ())),
        bad_words=draw(rarely(st.lists(word, min_size=1, max_size=9).map(tuple), ())),
        logprobs=draw(rarely(st.integers(0, 5), None)),
        logprob_token_ids=draw(rarely(few.map(tuple), ())),
    )
    return SamplerSpec(
        number,
        params,
        draw(st.integers(-(2**63), 2**64)),
        draw(tokens),
        draw(tokens),
        draw(rarely(few, [])),
        draw(st.integers(0, 10)),
    )


@given(st.data(), st.sampled_from([1, 31, 150]), st.sampled_from([2, 256]), st.booleans())
@settings(max_examples=settings.default.max_examples // 12)  # type: ignore[union-attr]
def test_draws_are_those_of_the_cpu(
    data: st.DataObject, vocab_size: int, limit: int, ties: bool
) -> None:
    """Over two steps, by every combination of parameters, also where many logits are equal."""
    specs = [data.draw(specs_of(number, vocab_size)) for number in range(4)]
    # A token is drawn even if all are blocked, but it may be another one.
    every = set(range(vocab_size))
    specs = [s for s in specs if not blocks_all(s, every)]
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 20)))
    steps = 3 * torch.randn(2, len(specs), vocab_size, generator=random)
    mask = bytes(torch.randint(1, 256, (-(-vocab_size // 8),), generator=random).tolist())
    with blocks(**SMALL, LIMIT=limit):
        compare(specs, list(steps.round() if ties else steps), {0: mask} if ties else None)


def blocks_all(spec: SamplerSpec, every: set[int]) -> bool:
    """Whether all tokens may be blocked at once."""
    allowed = set(spec.params.allowed_token_ids) or every
    forbidden = {word[-1] for word in spec.params.bad_words} | set(spec.blocked_tokens)
    return forbidden >= allowed
