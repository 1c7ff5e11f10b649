"""Each family against transformers, in fp32: logits and greedy tokens, on one rank and on two, and
after a prompt was handed over."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.kernels.cpu import jit
from tandem.kernels.operators import Operators
from tandem.shared.engine.plan import RankSampling, SamplerSpec, SequenceStep, StepPlan
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.weights.source import read_spec
from tandem.tests.support.batches import build_batch
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.ranks import Ranks, build_ranks, hand_over
from tandem.tests.support.runners import build_runner

STEPS = 16
# Of these, by ranks and after a handoff.
DECODED = 8
BLOCK = 4
# Prompts that tests share, by their lengths. None begins as another does.
SEEDS = {50: 0, 1: 1, 33: 33}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 512, (length,), generator=generator).tolist()


@cache
def reference(folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def reference_run(folder: Path, length: int, seed: int = 0) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the logits [STEPS, V] that gave them."""
    return _reference_run(folder, length, seed)


@cache
def _reference_run(folder: Path, length: int, seed: int) -> tuple[list[int], torch.Tensor]:
    """One pass of transformers over tokens that a runner has drawn shows that each is the greedy
    one, and owes nothing to a cache."""
    prompt = prompt_of(length, seed)
    tokens = greedy(one_runner(folder), prompt, consecutive(0, length + STEPS))
    with torch.inference_mode():
        passed = reference(folder)(torch.tensor([prompt + tokens[:-1]]), use_cache=False)
    logits = passed.logits[0, length - 1 :]
    assert logits.argmax(-1).tolist() == tokens
    return tokens, logits


def runner_for(
    folder: Path, num_blocks: int = 400, operators: Operators | None = None
) -> ModelRunner:
    return build_runner(
        folder, dtype="float32", block_size=BLOCK, num_blocks=num_blocks, operators=operators
    )


@cache
def one_runner(folder: Path) -> ModelRunner:
    """A runner for several tests, whose cache holds what the earlier ones left."""
    return runner_for(folder)


def compiled_operators() -> Operators:
    jit.prepare()
    from tandem.kernels.cpu.operators import CompiledOperators

    return CompiledOperators()


def spec_of(sequence_id: int, prompt: list[int], **params: Any) -> SamplerSpec:
    return SamplerSpec(sequence_id, RankSampling(**{"temperature": 0.0, **params}), 0, prompt)


def consecutive(first: int, tokens: int) -> list[int]:
    return list(range(first, first + -(-tokens // BLOCK)))


def scattered_slots(first: int, tokens: int) -> list[int]:
    """Every second block, backwards."""
    return [first + 2 * index for index in range(-(-tokens // BLOCK))][::-1]


def greedy(
    runner: ModelRunner, prompt: list[int], table: list[int], chunk: int = 10_000
) -> list[int]:
    """Prefill in chunks, then STEPS greedy tokens."""
    specs = [spec_of(1, prompt)]
    tokens: list[int] = []
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        last = start + len(part) == len(prompt)
        plan = StepPlan.of(0, [SequenceStep(1, part, start, table, last)], specs)
        specs = []
        tokens += runner.execute(plan).sampled.get(1, [])
    while len(tokens) < STEPS:
        start = len(prompt) + len(tokens) - 1
        plan = StepPlan.of(0, [SequenceStep(1, tokens[-1:], start, table, True)])
        tokens += runner.execute(plan).sampled[1]
    runner.execute(StepPlan.of(0, [], removed=[1]))
    return tokens


def test_logits_are_those_of_transformers(folder: Path) -> None:
    check_logits(folder, 50)


@pytest.mark.parametrize("length", SEEDS.keys() - {50})
def test_logits_after_short_prompts_are_those_of_transformers(
    common_folder: Path, length: int
) -> None:
    check_logits(common_folder, length)


def check_logits(folder: Path, length: int) -> None:
    runner = one_runner(folder)
    expected_tokens, expected = reference_run(folder, length, SEEDS[length])
    prompt = prompt_of(length, SEEDS[length])
    table = consecutive(3, length + STEPS)
    tokens, start = prompt, 0
    for step in range(STEPS):
        batch = build_batch(
            [SequenceStep(1, tokens, start, table, True)], BLOCK, runner.cache.device
        )
        with torch.inference_mode():
            logits = runner.model.logits(runner.model.forward(batch, runner.cache.kv))
        assert logits is not None
        torch.testing.assert_close(logits[0], expected[step], atol=1e-4, rtol=1e-4)
        start += len(tokens)
        tokens = [expected_tokens[step]]


@pytest.mark.parametrize("name", tiny_models.WRAPPED)
def test_the_text_part_of_a_model_of_images_is_a_text_model(model_root: Path, name: str) -> None:
    """So what follows is not repeated for it."""
    text = tiny_models.WRAPPED[name][1]
    wrapped, alone = (read_spec(tiny_models.cached(each, model_root)) for each in (name, text))
    assert wrapped == alone


def test_greedy_tokens_vary(folder: Path) -> None:
    assert len(set(reference_run(folder, 50)[0])) > STEPS // 2


def test_greedy_is_the_same_in_chunks_over_scattered_blocks(text_folder: Path) -> None:
    expected, _ = reference_run(text_folder, 50)
    assert greedy(one_runner(text_folder), prompt_of(50), scattered_slots(5, 70), 7) == expected


@pytest.mark.parametrize("chunk", [1, 32, 10_000])
def test_greedy_is_the_same_in_chunks(common_folder: Path, chunk: int) -> None:
    expected, _ = reference_run(common_folder, 50)
    assert greedy(one_runner(common_folder), prompt_of(50), consecutive(0, 70), chunk) == expected


def test_greedy_is_the_same_in_a_mixed_batch(text_folder: Path) -> None:
    """Sequences of different lengths join while others decode, one in chunks."""
    check_mixed_batch(text_folder, compiled_operators())


def test_greedy_is_the_same_in_a_mixed_batch_in_torch(common_folder: Path) -> None:
    check_mixed_batch(common_folder, Operators())


def check_mixed_batch(folder: Path, operators: Operators) -> None:
    runner = runner_for(folder, operators=operators)
    lengths = dict(enumerate(SEEDS, 1))
    prompts = {i: prompt_of(n, SEEDS[n]) for i, n in lengths.items()}
    tables = {1: consecutive(0, 80), 2: scattered_slots(100, 80), 3: consecutive(50, 80)}
    joins = {1: 0, 2: 2, 3: 3}
    done: dict[int, int] = dict.fromkeys(lengths, 0)
    outputs: dict[int, list[int]] = {i: [] for i in lengths}
    for step in range(40):
        sequences, specs = [], []
        for i, prompt in prompts.items():
            if step < joins[i] or len(outputs[i]) >= STEPS:
                continue
            specs += [spec_of(i, prompt)] * (step == joins[i])
            values = prompt + outputs[i]
            tokens = values[done[i] : done[i] + 19]
            last = done[i] + len(tokens) == len(values)
            sequences.append(SequenceStep(i, tokens, done[i], tables[i], last))
            done[i] += len(tokens)
        for key, drawn in runner.execute(StepPlan.of(step, sequences, specs)).sampled.items():
            outputs[key].extend(drawn)
    assert outputs == {i: reference_run(folder, n, SEEDS[n])[0] for i, n in lengths.items()}


@pytest.fixture(scope="module")
def sides(text_folder: Path) -> dict[str, Ranks]:
    """What may hand over to each other, by the number of ranks. The cache of the first one holds
    what other tests left there."""
    return {
        "one": Ranks([one_runner(text_folder)]),
        "another": build_ranks(text_folder, 1, block_size=2 * BLOCK),
        "two": build_ranks(text_folder, 2, block_size=2 * BLOCK),
    }


def check_following(ranks: Ranks, folder: Path, start: int, table: list[int]) -> None:
    """The logits and tokens after the prompt, whose KV is known up to ``start``."""
    tokens, expected = reference_run(folder, 50)
    parts = [prompt_of(50)[start:], *([token] for token in tokens[:DECODED])]
    result = ranks.logits(parts, start, table)
    torch.testing.assert_close(result, expected[: DECODED + 1], atol=1e-4, rtol=1e-4)
    assert result.argmax(-1).tolist() == tokens[: DECODED + 1]


def test_two_ranks_have_the_logits_of_transformers(
    text_folder: Path, sides: dict[str, Ranks]
) -> None:
    table = scattered_slots(5, 70)
    sides["two"].logits([prompt_of(50)[:31]], 0, table)
    check_following(sides["two"], text_folder, 31, table)


@pytest.mark.parametrize("senders, receivers", [("one", "another"), ("two", "one"), ("one", "two")])
def test_the_receiver_of_a_prompt_has_the_logits_of_transformers(
    text_folder: Path, sides: dict[str, Ranks], senders: str, receivers: str
) -> None:
    """Block tables and sizes differ, and a rank gets each head from one that has it."""
    theirs, ours, end = [9, 2, 4, 30, 31, 7, 8, *range(40, 55)], scattered_slots(5, 70), 49
    reference_run(text_folder, 50)  # now, as it computes in the cache of the one runner
    sides[senders].logits([prompt_of(50)[:end]], 0, theirs)
    hand_over(sides[senders], sides[receivers], end, theirs, ours)
    check_following(sides[receivers], text_folder, end, ours)


def test_a_chunk_longer_than_a_tile_matches(model_root: Path) -> None:
    prompt = prompt_of(1100)
    for name in ("qwen3", "mistral", "deepseek_v3_dense"):
        folder = tiny_models.cached(name, model_root)
        output = greedy(
            runner_for(folder, num_blocks=700), prompt, scattered_slots(0, 1120)[::-1], 700
        )
        # One pass over the drawn tokens checks each of them.
        with torch.inference_mode():
            logits = reference(folder)(torch.tensor([prompt + output[:-1]])).logits[0]
        assert output == logits[len(prompt) - 1 :].argmax(-1).tolist()
