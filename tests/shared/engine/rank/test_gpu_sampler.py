"""The GPU's sampler against the CPU's: on a GPU if there is one, else as Triton interprets its
kernels. Without Triton they are skipped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tandem.shared.engine.plan import PromptTargets, RankSampling, SamplerSpec
from tandem.shared.engine.rank import sampler_choice, table_upload
from tandem.shared.engine.rank.device_logprobs import PromptLogprobs, prompt_entries
from tandem.shared.engine.rank.logprobs import position_logprobs
from tandem.shared.engine.rank.sampler import Sampler
from tandem.tests.support.draws import Sampled, draw, last_tokens

pytest.importorskip("triton")

from tandem.kernels.gpu import sampling, sampling_edits, sampling_floors, sampling_table
from tandem.shared.engine.rank.gpu_sampler import GpuSampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 20
# So that rows and lists have several blocks, and a list of candidates may be too short.
SMALL = {"BLOCK": 64, "EDITED_TILE": 32, "ITEMS": 8, "PART": 128, "TILE": 32, "LISTED": 16}


@contextmanager
def blocks(**sizes: int) -> Iterator[None]:
    """Other sizes of the kernels' blocks."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sampling, sampling_edits, sampling_floors):
            for name in vars(module).keys() & sizes:
                patch.setattr(module, name, sizes[name])
        yield


def sampler_of(vocab_size: int) -> GpuSampler:
    return GpuSampler(vocab_size, last_tokens(SLOTS, DEVICE))


def compare(
    specs: list[SamplerSpec], steps: list[torch.Tensor], masks: dict[int, bytes] | None = None
) -> list[list[Sampled]]:
    """Draw from these logits by both samplers, and require the same tokens, failures and
    logprobs."""
    vocab_size, slots = steps[0].shape[1], range(len(specs))
    lasts = [last_tokens(SLOTS, device) for device in ("cpu", DEVICE)]
    expected, actual = Sampler(vocab_size, lasts[0]), GpuSampler(vocab_size, lasts[1])
    for slot, spec in enumerate(specs):
        expected.add(slot, spec)
        actual.add(slot, spec)
    results = []
    for logits in steps:
        wanted, wanted_failures = draw(expected, slots, logits, masks or {})
        drawn, failures = draw(actual, slots, logits, masks or {})
        assert failures == wanted_failures
        drawing = [slot for slot in slots if specs[slot].sequence_id not in failures]
        assert torch.equal(lasts[0][drawing], lasts[1][drawing].cpu())
        for one, other in zip(drawn, wanted, strict=True):
            assert (one.sequence_id, one.tokens) == (other.sequence_id, other.tokens)
            assert_same_logprobs(one, other)
        results.append(drawn)
    return results


def assert_same_logprobs(one: Sampled, other: Sampled) -> None:
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        assert (mine.token, mine.rank) == (theirs.token, theirs.rank)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        values = [value for _, value in theirs.top]
        assert [value for _, value in mine.top] == pytest.approx(values, abs=1e-5)


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 700, "logprobs": 2},
    {"top_p": 0.7, "temperature": 1.3},
    {"min_p": 0.1, "repetition_penalty": 1.3},
    {"top_k": 900, "top_p": 0.9, "min_p": 0.01, "logprobs": 64, "logit_bias": {4: 1.0}},
]


@pytest.mark.parametrize(("limit", "begin"), [(16, len(PARAMS) - 2), (1024, 0)])
def test_rows_of_several_blocks_are_drawn_as_on_the_cpu(limit: int, begin: int) -> None:
    """With the usual blocks, also where there are more candidates than their list takes."""
    random = torch.Generator().manual_seed(1)
    params = [RankSampling(**each) for each in PARAMS[begin:]]
    specs = [SamplerSpec(i, each, i, [1, 2, 3]) for i, each in enumerate(params)]
    steps = torch.randn(2, len(specs), 9_001, generator=random)
    with blocks(LIMIT=limit):
        compare(specs, [steps[0], (steps[1] * 2).round() / 2])


def test_a_resumed_sequence_goes_on_as_if_it_had_not_stopped() -> None:
    words = ((1,), (2, 3), (4, 5, 6))
    params = RankSampling(repetition_penalty=1.4, frequency_penalty=0.3, bad_words=words)
    steps = list(torch.randn(5, 1, 12, generator=torch.Generator().manual_seed(2)))
    with blocks(**SMALL):
        whole = [step[0].tokens[0] for step in compare([SamplerSpec(3, params, 5)], steps)]
        resumed = SamplerSpec(3, params, 5, outputs=whole[:3])
        assert [step[0].tokens[0] for step in compare([resumed], steps[3:])] == whole[3:]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_fail_alone_and_draw_nothing(bad: float) -> None:
    edited = {"blocked_tokens": [90], "blocked_until": 9}
    specs = [
        SamplerSpec(0, RankSampling(top_k=3), 1),
        SamplerSpec(1, RankSampling(top_p=0.9), 2),
        SamplerSpec(2, RankSampling(temperature=0.0), 3, **edited),  # type: ignore[arg-type]
        SamplerSpec(3, RankSampling(presence_penalty=1.0), 4, **edited),  # type: ignore[arg-type]
    ]
    steps = torch.randn(3, 4, 150, generator=torch.Generator().manual_seed(3))
    steps[1, 1:, 90] = bad
    with blocks(**SMALL):
        drawn = compare(specs, list(steps))
    assert [len(each) for each in drawn] == [4, 1, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_if_nothing_may_be_drawn_a_grammar_decides(temperature: float) -> None:
    params = RankSampling(temperature=temperature, top_p=0.9)
    blocked = list(range(90))
    blocking = SamplerSpec(0, params, 1, blocked_tokens=blocked, blocked_until=9)
    # Some of these are blocked, then all.
    masks = [bytes([0] * 10 + [0b11000001] * 9), bytes([0b10010000] * 4 + [0] * 15)]
    steps = list(torch.randn(2, 1, 150, generator=torch.Generator().manual_seed(4)))
    with blocks(**SMALL):
        for mask in masks:
            for (one,) in compare([blocking], steps, {0: mask}):
                assert mask[one.tokens[0] // 8] >> one.tokens[0] % 8 & 1
        every = SamplerSpec(0, params, 1, blocked_tokens=list(range(150)), blocked_until=9)
        sampler = sampler_of(150)
        sampler.add(0, every)
        ((one,), _) = draw(sampler, [0], steps[0])
    assert 0 <= one.tokens[0] < 150


def test_a_draw_depends_on_its_row_alone_and_padding_draws_nothing() -> None:
    random = torch.Generator().manual_seed(6)
    specs = [SamplerSpec(i, RankSampling(**p), i, [1, 2, 3]) for i, p in enumerate(PARAMS)]
    steps = torch.randn(2, len(specs), 150, generator=random)
    last = last_tokens(SLOTS, DEVICE)
    with blocks(**SMALL):
        sampler = GpuSampler(150, last)
        slots = [3, 19, 0, 7, 8, 11]
        for slot, spec in zip(slots, specs, strict=True):
            sampler.add(slot, spec)
        slots_R = torch.tensor([*slots, -1, -1], dtype=torch.int32, device=DEVICE)
        padding = torch.full((2, 150), math.nan)
        together = []
        for logits in steps:
            draws = sampler.draw(slots_R, slots, torch.cat([logits, padding]).to(DEVICE))
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            together.append([*draws.collect().sampled.values()])
        alone = [
            compare([spec], [x[row : row + 1] for x in steps]) for row, spec in enumerate(specs)
        ]
    assert together == [[one[step][0].tokens for one in alone] for step in range(2)]
    expected = last_tokens(SLOTS).tolist()
    for slot, (token,) in zip(slots, together[-1], strict=True):
        expected[slot] = token
    assert last.tolist() == expected


def test_slots_are_used_again_without_the_history_of_those_before() -> None:
    sampler = sampler_of(40)
    logits = torch.zeros(1, 40)
    logits[0, 5] = 1.0
    with blocks(**SMALL):
        for number in range(3):
            params = RankSampling(temperature=0.0, presence_penalty=2.0)
            sampler.add(1, SamplerSpec(number, params, 0))
            tokens = [draw(sampler, [1], logits)[0][0].tokens[0] for _ in range(2)]
            assert tokens == [5, 0]
            sampler.remove(1)
    sampler.remove(9)
    assert draw(sampler, [], logits[:0]) == ([], {})


def test_a_sequence_keeps_no_memory_of_those_that_began_with_it() -> None:
    together, alone = sampler_of(150), sampler_of(150)
    spec = SamplerSpec(1, RankSampling(presence_penalty=1.0), 1)
    for sampler, count in ((together, 9), (alone, 1)):
        for slot in range(count):
            sampler.add(slot, spec)
        with blocks(**SMALL):
            for _ in range(2):
                draw(sampler, range(count), torch.zeros(count, 150))
    for slot in range(1, 9):
        together.remove(slot)
    kept, expected = (
        sum(each.untyped_storage().nbytes() for each in sampler._lists.values())
        for sampler in (together, alone)
    )
    assert kept == expected > 0


@pytest.mark.parametrize("top", [0, 3, 64])
def test_logprobs_of_prompts_are_those_of_the_cpu(top: int) -> None:
    """More rows than are searched at a time, of few values, so that many are equal."""
    random = torch.Generator().manual_seed(5)
    logits = torch.randn(70, 150, generator=random).mul_(2).round_()
    tokens = torch.randint(150, (70,), generator=random)
    asks = {
        0: PromptTargets(top, tuple(tokens[:40].tolist())),
        1: PromptTargets(0, tuple(tokens[40:].tolist())),
    }
    entries = prompt_entries(logits.to(DEVICE), tokens.to(DEVICE), top)
    collected = PromptLogprobs(asks, entries.cpu()).collect()
    for mine, rows, one in zip(
        collected.values(), logits.split((40, 30)), asks.values(), strict=True
    ):
        expected = position_logprobs(rows, one.targets, one.top)
        assert_same_logprobs(Sampled(0, [], mine), Sampled(0, [], expected))


def test_a_token_that_is_certain_has_a_logprob_of_0_without_a_sign() -> None:
    entries = prompt_entries(torch.tensor([[0.0, 200.0]]), torch.tensor([1]), 2)
    (one,) = PromptLogprobs({0: PromptTargets(2, (1,))}, entries).collect()[0]
    assert str((one.logprob, *one.top)) == "(0.0, (1, 0.0), (0, -200.0))"


def test_the_trial_passes() -> None:
    assert sampler_choice.first_difference(301, DEVICE) == ""
    assert type(sampler_choice.sampler_for(301, torch.zeros(1, dtype=torch.int32))) is Sampler


@pytest.mark.parametrize("reason", ["other tokens", RuntimeError("no C compiler")])
def test_a_sampler_that_is_wrong_is_not_relied_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: object
) -> None:
    draw_tokens = sampling.draw_tokens

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        if isinstance(reason, Exception):
            raise reason
        return (draw_tokens(*arguments, **options) + 1) % 50

    monkeypatch.setattr(sampling, "draw_tokens", wrong)
    problem = sampler_choice.passes(
        lambda: sampler_choice.first_difference(50, DEVICE), "torch draws"
    )
    assert not problem
    assert ("drew" if isinstance(reason, str) else "no C compiler") in caplog.text


def test_masks_of_sequences_that_do_not_draw_change_nothing() -> None:
    sampler = sampler_of(40)
    logits = torch.zeros(1, 40)
    logits[0, 5] = 1.0
    only_9 = bytes([0, 2, 0, 0, 0])
    with blocks(**SMALL):
        for slot in (1, 2):
            sampler.add(slot, SamplerSpec(slot, RankSampling(temperature=0.0), 0))
        for slot, masks, token in (
            (1, {2: only_9, 3: only_9}, 5),
            (2, {}, 5),
            (2, {2: only_9}, 9),
        ):
            assert draw(sampler, [slot], logits, masks)[0][0].tokens == [token]


def test_a_new_sequence_has_its_mask_in_whatever_order_threads_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_columns = sampling_table.set_columns
    monkeypatch.setattr(
        table_upload, "set_columns", lambda table, pairs: set_columns(table, pairs.flip(0))
    )
    sampler = sampler_of(40)
    sampler.add(1, SamplerSpec(1, RankSampling(), 0))
    with blocks(**SMALL):
        drawn, _ = draw(sampler, [1], torch.zeros(1, 40), {1: bytes([0, 2, 0, 0, 0])})
    assert drawn[0].tokens == [9]
