"""One rank's steps: prompt logprobs, empty steps, sequences that come and go, broken weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tandem.shared.engine.plan import (
    COMPUTATION,
    OUT_OF_MEMORY,
    PooledRow,
    RankSampling,
    SamplerSpec,
    SequenceStep,
    SlotLimits,
    StepPlan,
)
from tandem.shared.engine.rank import output_rows
from tandem.shared.engine.rank.last_draws import StepVoidError
from tandem.shared.engine.rank.loading import LoadedModel
from tandem.shared.engine.rank.runner import ModelRunner, cause_of
from tandem.shared.models.parallel import TensorParallel
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.runners import build_runner, embeddings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.cached("qwen3", tmp_path_factory.mktemp("runner"))


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return build_runner(folder, dtype="float32", block_size=4, num_blocks=32)


def spec_of(sequence_id: int, **params: Any) -> SamplerSpec:
    return SamplerSpec(sequence_id, RankSampling(**{"temperature": 0.0, **params}), 3, [1, 2])


def test_a_step_without_sequences(runner: ModelRunner) -> None:
    result = runner.execute(StepPlan.of(5, [], [spec_of(1)], [7]))
    assert (result.step, result.sampled, result.failed) == (5, {}, {})


def test_prompt_logprobs_are_the_same_in_chunks(runner: ModelRunner) -> None:
    prompt = torch.randint(0, 512, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    table = list(range(23))
    whole = SequenceStep(1, prompt, 0, table, True, 2, tuple(prompt[1:]))
    expected = runner.execute(StepPlan.of(0, [whole], [spec_of(1)])).prompt_logprobs[1]
    assert [row.token for row in expected] == prompt[1:]
    assert all(row.logprob < 0 and len(row.top) == 2 and row.rank >= 1 for row in expected)
    logprobs = []
    for start in range(0, 90, 13):
        part = prompt[start : start + 13]
        targets = tuple(prompt[start + 1 : start + 14])
        step = SequenceStep(2, part, start, table, False, 2, targets)
        beside = SequenceStep(3, prompt[:3], 0, [30], True)
        result = runner.execute(StepPlan.of(0, [step, beside], [spec_of(3)]))
        assert [*result.sampled] == [3]
        logprobs += result.prompt_logprobs[2]
    assert [row.token for row in logprobs] == prompt[1:]
    for one, other in zip(expected, logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.rank == other.rank


class _Rank(TensorParallel):
    """One of two ranks without the other; notes the shapes of what they gather."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, 2)
        object.__setattr__(self, "shapes", [])

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        vars(self)["shapes"].append(x.shape)
        return [] if self.rank else [x, x]


def test_ranks_gather_the_same_rows_and_only_the_first_has_a_sampler(folder: Path) -> None:
    """Of two prompts with logprobs, together more than are computed at a time."""
    prompts = [[5] * 11, [6] * 61]
    rows = [
        SequenceStep(key, prompt, 0, [key * 16 + n for n in range(16)], True, 1, tuple(prompt[1:]))
        for key, prompt in enumerate(prompts)
    ]
    results, shapes = [], []
    for rank in range(2):
        tp = _Rank(rank)
        runner = build_runner(folder, dtype="float32", block_size=4, num_blocks=32, tp=tp)
        assert (runner.sampler is None) == bool(rank)
        results.append(runner.execute(StepPlan.of(0, rows, [spec_of(0), spec_of(1)])))
        shapes.append(vars(tp)["shapes"])
    assert shapes[0] == shapes[1]
    assert [shape[0] for shape in shapes[0]] == [2, 64, 6]
    logprobs = results[0].prompt_logprobs
    assert [[one.token for one in logprobs[key]] for key in range(2)] == [[5] * 10, [6] * 60]
    assert not results[1].prompt_logprobs and not results[1].sampled


def test_a_sequence_may_be_removed_and_come_back_in_one_step(runner: ModelRunner) -> None:
    first = SequenceStep(1, [1, 2], 0, [4], True)
    penalised = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    one = runner.execute(StepPlan.of(0, [first], [spec_of(1, **penalised)])).sampled
    again = runner.execute(StepPlan.of(1, [first], [spec_of(1, **penalised)], [1])).sampled
    assert one == again


def test_a_step_planned_on_top_of_one_that_failed_is_void(runner: ModelRunner) -> None:
    """Nothing of it is computed, and no layer is announced to a transfer."""
    good = SequenceStep(1, [5], 0, [4], True)
    layers: list[int] = []
    runner.execute(StepPlan.of(1, [good], [spec_of(1)]))
    with pytest.raises(RuntimeError, match="block table"):
        runner.execute(StepPlan.of(2, [good._replace(first_block=1000)], ahead=True))
    for step in (3, 4):
        with pytest.raises(StepVoidError):
            runner.launch(StepPlan.of(step, [good], [], [1], ahead=True), layers.append)
    assert 1 in runner.slots and not layers
    assert runner.execute(StepPlan.of(5, [good], [spec_of(1)], [1]), layers.append).sampled
    assert layers
    assert runner.execute(StepPlan.of(6, [good._replace(start=1)], ahead=True)).sampled


@pytest.mark.parametrize("alone", [True, False])
def test_broken_numbers_of_a_chunk_that_samples_nothing_are_seen(folder: Path, alone: bool) -> None:
    runner = build_runner(folder, dtype="float32", block_size=4, num_blocks=32)
    embeddings(runner.model)[9].fill_(math.nan)
    bad = SequenceStep(1, [8, 9, 8, 8], 0, [0], False)
    good = SequenceStep(2, [8, 7, 8, 8], 0, [1], False)
    sampling = [] if alone else [SequenceStep(3, [8], 0, [2], True)]
    result = runner.execute(StepPlan.of(0, [bad, *sampling, good], [spec_of(3)]))
    assert list(result.failed) == [1] and "not finite" in result.failed[1]
    assert [*result.sampled] == ([] if alone else [3])


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OUT_OF_MEMORY),
        (MemoryError(), OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"), OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), OUT_OF_MEMORY),
        (IndexError("list index out of range"), COMPUTATION),
    ],
)
def test_a_failure_has_a_cause(error: Exception, cause: str) -> None:
    assert cause_of(error) == cause


def test_vectors_of_all_sequences_are_copied_at_once(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Mock(wraps=output_rows.to_host)
    rows = [
        SequenceStep(number, [number] * count, 0, [number], False, pool=PooledRow("sum"))
        for number, count in ((1, 3), (2, 1), (3, 4))
    ]
    alone = [runner.execute(StepPlan.of(0, [row], removed=[1, 2, 3])).hidden for row in rows]
    monkeypatch.setattr(output_rows, "to_host", copy)
    together = runner.execute(StepPlan.of(1, rows, removed=[1, 2, 3]))
    assert copy.call_count == 2, "the vectors, and whether the last rows are finite"
    for one in alone:
        for key, expected in one.items():
            x, y = (np.frombuffer(each, np.float32) for each in (together.hidden[key], expected))
            np.testing.assert_allclose(x, y, atol=1e-4)


def test_broken_numbers_fail_the_sequence_and_not_the_step(folder: Path) -> None:
    runner = build_runner(folder, dtype="float32", block_size=4, num_blocks=32)
    embeddings(runner.model)[9].fill_(math.nan)
    plan = StepPlan.of(
        0,
        [SequenceStep(1, [9], 0, [0], True), SequenceStep(2, [8], 0, [1], True)],
        [spec_of(1), spec_of(2)],
    )
    result = runner.execute(plan)
    assert [*result.sampled] == [2]
    assert list(result.failed) == [1]


def test_an_fp8_cache_takes_a_quarter_of_a_float32_one(folder: Path) -> None:
    fp8 = build_runner(folder, dtype="float32", kv_dtype="fp8", block_size=4, num_blocks=4)
    rank = LoadedModel(fp8.model, 4, fp8.cache.dtype, fp8.tp)
    assert rank.bytes_per_block == 3072 // 4
    assert rank.runner(5, SlotLimits(1, 5)).cache.dtype == torch.float8_e4m3fn
