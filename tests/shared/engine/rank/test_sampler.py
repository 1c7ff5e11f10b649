"""The sampler: each parameter, the distribution of draws, and the independence of rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.shared.engine.plan import RankSampling, SamplerSpec
from tandem.shared.engine.rank.logprobs import position_logprobs
from tandem.shared.engine.rank.sampler import NOT_FINITE_MESSAGE, Sampler, uniform
from tandem.tests.support.draws import Sampled, draw, last_tokens

VOCAB, SLOTS = 50, 9


@pytest.fixture(autouse=True)
def fixed_logits() -> None:
    torch.manual_seed(0)


def spec_of(sequence_id: int = 1, seed: int = 7, **values: Any) -> SamplerSpec:
    outside = {key: values.pop(key) for key in list(values) if key in SamplerSpec.__slots__}
    return SamplerSpec(sequence_id, RankSampling(**values), seed, **outside)


def sampler_of(vocab_size: int, *specs: SamplerSpec, slots: int = SLOTS) -> Sampler:
    """A sampler of sequences whose slots are their ids."""
    sampler = Sampler(vocab_size, last_tokens(slots))
    for spec in specs:
        sampler.add(spec.sequence_id, spec)
    return sampler


def draw_one(logits: torch.Tensor, spec: SamplerSpec) -> Sampled:
    sampler = sampler_of(logits.shape[-1], spec)
    samples, failures = draw(sampler, [spec.sequence_id], logits[None])
    assert not failures
    return samples[0]


def frequencies(logits: torch.Tensor, draws: int = 4000, **params: Any) -> torch.Tensor:
    """The frequency of each token over many seeds."""
    specs = [spec_of(seed, seed, **params) for seed in range(draws)]
    sampler = sampler_of(logits.shape[-1], *specs, slots=draws)
    samples, _ = draw(sampler, range(draws), logits.repeat(draws, 1))
    tokens = torch.tensor([s.tokens[0] for s in samples])
    return torch.bincount(tokens, minlength=logits.shape[-1]) / draws


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def test_uniforms_are_uniform() -> None:
    numbers = torch.tensor([uniform(seed, index) for seed in range(100) for index in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    # 19 degrees of freedom: 43.8 is exceeded once in a thousand.
    assert float(((counts - 500) ** 2 / 500).sum()) < 43.8
    assert uniform(-1, 0) != uniform(2**63 - 1, 0)


def test_greedy_takes_the_best_and_temperature_zero_never_divides() -> None:
    logits = torch.randn(VOCAB)
    assert draw_one(logits, spec_of(temperature=0.0)).tokens[0] == int(logits.argmax())
    assert draw_one(logits, spec_of(temperature=1e-9)).tokens[0] == int(logits.argmax())
    assert draw_one(logits * 1e4, spec_of(temperature=1e-4)).tokens[0] == int(logits.argmax())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_distribution(temperature: float) -> None:
    logits = torch.randn(12) * 1.5
    expected = (logits / temperature).softmax(dim=-1) * 4000
    counts = frequencies(logits, temperature=temperature) * 4000
    # 11 degrees of freedom: 31.3 is exceeded once in a thousand; the seeds are fixed.
    assert float(((counts - expected) ** 2 / expected).sum()) < 31.3


def test_top_k_keeps_k_and_ties_with_the_last() -> None:
    logits = logits_of(0.4, 0.2, 0.2, 0.1, 0.1)
    assert frequencies(logits, top_k=1).tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    two = frequencies(logits, top_k=2)
    assert (two > 0).tolist() == [True, True, True, False, False]
    torch.testing.assert_close(two[:3], torch.tensor([0.5, 0.25, 0.25]), atol=0.03, rtol=0)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = logits_of(0.15, 0.5, 0.3, 0.05)
    mask = {p: (frequencies(logits, top_p=p) > 0).tolist() for p in (0.0, 0.4, 0.6, 0.9, 0.99)}
    assert mask[0.0] == mask[0.4] == [False, True, False, False]
    assert mask[0.6] == [False, True, True, False]
    assert mask[0.9] == [True, True, True, False]
    assert mask[0.99] == [True, True, True, True]


def test_top_p_is_right_beyond_the_candidates_it_sorts_first() -> None:
    logits = torch.zeros(5000)
    logits[0] = 1.0
    logits[4000:] = -1.0
    result = frequencies(logits, draws=300, top_p=0.5)
    assert (result[4000:] == 0).all()
    assert (result > 0).sum() > 200


def test_min_p_is_relative_to_the_best() -> None:
    mask = frequencies(logits_of(0.6, 0.25, 0.1, 0.05), min_p=0.3) > 0
    assert mask.tolist() == [True, True, False, False]


def test_filters_work_on_what_is_left_by_the_earlier_ones() -> None:
    # Of the two that top-k leaves, the first has 0.625 and is enough for top-p.
    mask = frequencies(logits_of(0.5, 0.3, 0.1, 0.1), top_k=2, top_p=0.6) > 0
    assert mask.tolist() == [True, False, False, False]


def test_penalties_and_bias() -> None:
    logits = torch.tensor([2.0, 1.9, -1.0, 0.0])
    greedy: dict[str, Any] = {"temperature": 0.0}
    assert draw_one(logits, spec_of(**greedy, prompt=(0,), repetition_penalty=1.5)).tokens[0] == 1
    assert draw_one(logits, spec_of(**greedy, prompt=(0,), presence_penalty=1.5)).tokens[0] == 0
    assert draw_one(logits, spec_of(**greedy, outputs=(0,), presence_penalty=0.2)).tokens[0] == 1
    assert draw_one(logits, spec_of(**greedy, outputs=(0,), frequency_penalty=0.06)).tokens[0] == 0
    assert (
        draw_one(logits, spec_of(**greedy, outputs=(0, 0), frequency_penalty=0.06)).tokens[0] == 1
    )
    assert draw_one(logits, spec_of(**greedy, logit_bias={3: 2.5})).tokens[0] == 3
    # A negative logit is multiplied, so that a repetition is always less likely.
    low = torch.tensor([-1.0, -1.2])
    assert draw_one(low, spec_of(**greedy, prompt=(0,), repetition_penalty=1.5)).tokens[0] == 1


def test_what_it_draws_counts_as_history() -> None:
    sampler = sampler_of(4, spec_of(temperature=0.0, presence_penalty=1.0))
    logits = torch.tensor([[2.0, 1.5, 1.2, 0.0]])
    tokens = [draw(sampler, [1], logits)[0][0].tokens[0] for _ in range(3)]
    assert tokens == [0, 1, 2]


def test_blocked_tokens_until_enough_outputs() -> None:
    sampler = sampler_of(
        4, spec_of(temperature=0.0, blocked_tokens=(0, 1), blocked_until=3, outputs=(5,))
    )
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0]])
    tokens = [draw(sampler, [1], logits)[0][0].tokens[0] for _ in range(4)]
    assert tokens == [2, 2, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn_with_their_relative_probabilities(
    temperature: float,
) -> None:
    logits = logits_of(0.5, 0.1, 0.1, 0.3)
    shares = frequencies(logits, temperature=temperature, allowed_token_ids=(3, 1))
    expected = torch.tensor([0.0, 0.25, 0.0, 0.75] if temperature else [0.0, 0.0, 0.0, 1.0])
    assert torch.allclose(shares, expected, atol=0.04)
    biased = spec_of(temperature=temperature, allowed_token_ids=(1,), logit_bias={2: 100.0})
    assert draw_one(logits, biased).tokens == [1]
    blocked = spec_of(
        temperature=temperature, allowed_token_ids=(1, 3), blocked_tokens=(3,), blocked_until=1
    )
    assert draw_one(logits, blocked).tokens == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_is_drawn_even_if_all_are_blocked(temperature: float) -> None:
    every = spec_of(temperature=temperature, blocked_tokens=tuple(range(4)), blocked_until=1)
    assert draw_one(torch.zeros(4), every).tokens[0] in range(4)


def mixed_specs() -> list[SamplerSpec]:
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 5, "logprobs": 2},
        {"top_p": 0.7, "temperature": 1.3},
        {"min_p": 0.1, "repetition_penalty": 1.3, "prompt": (1, 2, 3)},
        {"top_k": 9, "top_p": 0.9, "frequency_penalty": 0.5, "logit_bias": {4: 1.0}},
    ]
    return [spec_of(index, seed=index * 31, **o) for index, o in enumerate(options)]


def test_a_draw_depends_on_its_row_alone() -> None:
    logits = torch.randn(4, 6, 1000) * 3
    together = sampler_of(1000, *mixed_specs())
    alone = [sampler_of(1000, spec) for spec in mixed_specs()]
    for step in logits:
        order = torch.randperm(6).tolist()
        batch = draw(together, order, step[order])[0]
        for row in batch:
            i = row.sequence_id
            assert draw(alone[i], [i], step[i : i + 1])[0][0] == row


def test_a_resumed_sequence_goes_on_as_if_it_had_not_stopped() -> None:
    logits = torch.randn(6, 1, VOCAB)
    for spec in mixed_specs():
        sampler, slots = sampler_of(VOCAB, spec), [spec.sequence_id]
        tokens = [draw(sampler, slots, x)[0][0].tokens[0] for x in logits]
        resumed = sampler_of(VOCAB, replace(spec, outputs=tokens[:3]))
        assert [draw(resumed, slots, x)[0][0].tokens[0] for x in logits[3:]] == tokens[3:]


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float, on_cpu: bool) -> None:
    """Also on a GPU, where torch draws if Triton does not work, and if no row is finite."""
    last = last_tokens(SLOTS)
    sampler = Sampler(VOCAB, last)
    sampler._on_cpu = on_cpu
    for slot in (4, 2, 0):
        sampler.add(slot, spec_of(10 * slot, temperature=0.0, logprobs=1))
    logits = torch.randn(3, VOCAB)
    logits[1, 9] = bad
    best = logits.argmax(-1).tolist()
    samples, failures = draw(sampler, [4, 2, 0], logits)
    assert [(s.sequence_id, s.tokens[0]) for s in samples] == [(40, best[0]), (0, best[2])]
    assert failures == {20: NOT_FINITE_MESSAGE}
    expected = last_tokens(SLOTS)
    expected[0], expected[4] = best[2], best[0]
    assert torch.equal(last, expected)
    assert draw(sampler, [2], logits[1:2]) == ([], failures)
    assert torch.equal(last, expected)


def test_each_row_lists_the_requested_number_of_logprobs() -> None:
    logits = torch.randn(5, 500, generator=torch.Generator().manual_seed(4))
    counts = [3, None, 0, 1, 5]
    specs = [
        spec_of(index, temperature=0.0, logprobs=count, logit_bias={7: 2.0})
        for index, count in enumerate(counts)
    ]
    samples, _ = draw(sampler_of(500, *specs), range(5), logits)
    for row, (one, count) in enumerate(zip(samples, counts, strict=True)):
        if count is None:
            assert one.logprobs == []
        else:
            expected = position_logprobs(logits[row : row + 1], one.tokens, count)
            assert one.logprobs == expected


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(VOCAB)
    samples = draw_one(logits, spec_of(temperature=0.3, logprobs=3, logit_bias={11: 90.0}))
    assert samples.tokens[0] == 11
    raw = logits.log_softmax(dim=-1)
    (entry,) = samples.logprobs
    assert entry.logprob == pytest.approx(float(raw[11]), abs=1e-6)
    assert entry.rank == 1 + int((logits > logits[11]).sum())
    assert [token for token, _ in entry.top] == raw.topk(3).indices.tolist()
    assert len(draw_one(logits, spec_of(logprobs=0)).logprobs) == 1
    assert draw_one(logits, spec_of()).logprobs == []


def test_ties_among_the_top_are_listed_by_id() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 1.0, 0.0]])
    (entry,) = position_logprobs(logits, [4], 3)
    assert [token for token, _ in entry.top] == [3, 1, 4]
    assert entry.rank == 2
    (everything,) = position_logprobs(logits, [0], 99)
    assert [token for token, _ in everything.top] == [3, 1, 4, 5, 0, 2, 6]


def test_an_empty_batch_and_an_unknown_sequence_are_no_error() -> None:
    sampler = sampler_of(VOCAB)
    assert draw(sampler, [], torch.empty(0, VOCAB)) == ([], {})
    sampler.remove(8)


def test_a_bad_word_is_never_completed_also_after_a_resumption() -> None:
    logits = torch.zeros(VOCAB)
    logits[3], logits[5], logits[7] = 9, 8, 7
    greedy: dict[str, Any] = {"temperature": 0.0, "bad_words": ((3, 3, 3), (5,))}
    sampler = sampler_of(VOCAB, spec_of(**greedy))
    tokens = [draw(sampler, [1], logits[None])[0][0].tokens[0] for _ in range(6)]
    assert tokens == [3, 3, 7, 3, 3, 7]
    assert draw_one(logits, spec_of(outputs=[3, 3], **greedy)).tokens == [7]
    assert draw_one(logits, spec_of(outputs=[3], **greedy)).tokens == [3]
    assert draw_one(logits, spec_of(allowed_token_ids=(5,), **greedy)).tokens == [
        5
    ]  # nothing else may


def test_given_tokens_are_listed_after_the_chosen_one() -> None:
    logits = torch.randn(VOCAB)
    expected = logits.log_softmax(dim=-1)
    spec = spec_of(temperature=0.0, logprobs=5, logprob_token_ids=(40, 2))
    best = int(logits.argmax())
    [entry] = draw_one(logits, spec).logprobs
    assert [token for token, _ in entry.top] == [best, 40, 2]
    assert [value for _, value in entry.top] == pytest.approx(expected[[best, 40, 2]].tolist())


def test_a_nudge_shows_what_rounding_may_change() -> None:
    drawn = []
    for nudge in (-1.0, 0.0, 1.0):
        sampler = Sampler(9, last_tokens(1), nudge=nudge)
        sampler.add(0, SamplerSpec(0, RankSampling(allowed_token_ids=(2, 3, 4)), 0))
        drawn.append(draw(sampler, [0], torch.zeros(1, 9))[0][0].tokens[0])
    assert drawn == [2, 4, 4]
