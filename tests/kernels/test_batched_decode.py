"""Batched decode: which rows are batched, and the trial of the kernel, which has tests of its
own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tandem.kernels.attention_metadata import (
    AttentionConfig,
    AttentionParams,
    DecodeMetadata,
    SequenceMetadata,
    decode_metadata,
)
from tandem.kernels.errors import KernelUnavailableError
from tandem.kernels.operators import Operators
from tandem.kernels.reference.attention import paged_attention
from tandem.shared.engine.plan import RankSampling, SamplerSpec, SequenceStep, StepPlan
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.runners import build_runner

pytest.importorskip("triton")

from tandem.kernels.gpu import decode_trial, paged_decode
from tandem.kernels.gpu.operators import GpuOperators

CPU = torch.device("cpu")
CONFIG = AttentionConfig(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    heads=4,
    kv_heads=2,
    dim=8,
    block_size=16,
    params=AttentionParams(8**-0.5),
)


def test_of_each_decoding_row_the_table_has_its_number_its_length_and_its_blocks() -> None:
    contexts = [
        SequenceMetadata(slice(0, 1), 9, [7, 3, 5, 99], 4),
        SequenceMetadata(slice(1, 6), 0, [1, 2], 4),
        SequenceMetadata(slice(6, 7), 0, [8], 4),
    ]
    rows = decode_metadata(contexts, CPU)
    assert rows is not None
    assert rows.rows.tolist() == [[0, 0, 10], [6, 1, 1]]
    assert rows.tables.tolist() == [[7, 3, 5], [8, 0, 0]]
    assert (rows.tables.dtype, rows.max_seq_len, rows.block_size) == (torch.int32, 10, 4)


def test_a_step_of_chunks_has_none() -> None:
    assert decode_metadata([SequenceMetadata(slice(0, 2), 0, [1], 4)], CPU) is None
    assert decode_metadata([], CPU) is None


def one_by_one(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: DecodeMetadata,
    params: AttentionParams,
    out: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Compute what the kernel does, from the rows and tables that it gets."""
    for row, slot, length in rows.rows.tolist():
        blocks = rows.tables[slot].tolist()
        context = SequenceMetadata(slice(row, row + 1), length - 1, blocks, rows.block_size)
        paged_attention(q, keys, values, [context], params, out=out, sinks_H=sinks_H)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What is called instead of the kernel."""
    fake = Mock(side_effect=one_by_one)
    monkeypatch.setattr(paged_decode, "paged_decode", fake)
    return fake


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt_oss"])
def test_a_model_gives_the_same_with_batched_decode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: Mock, name: str
) -> None:
    folder = tiny_models.cached(name, tmp_path)
    outputs = []
    for at_once in (False, True):
        monkeypatch.setattr(decode_trial, "works", lambda *_, at_once=at_once, **__: at_once)
        runner = build_runner(
            folder, dtype="float32", block_size=4, num_blocks=64, operators=GpuOperators()
        )
        specs = [SamplerSpec(i, RankSampling(temperature=0.0), 0) for i in range(3)]
        prompts = [[5, 6, 7], list(range(30)), [9] * 17]
        tables = [[1, 40, 2], list(range(3, 13)), [50, 20, 30, 21, 22]]
        parts = zip(prompts, tables, strict=True)
        first = [SequenceStep(i, p, 0, t, True) for i, (p, t) in enumerate(parts)]
        samples = runner.execute(StepPlan.of(0, first, specs)).sampled
        # One goes on with a chunk, the others decode.
        second = [
            each._replace(tokens=samples[each.sequence_id], start=len(each.tokens))
            for each in first
        ]
        second[1] = second[1]._replace(tokens=[*samples[1], 1, 2])
        outputs.append((samples, runner.execute(StepPlan.of(1, second)).sampled))
    assert outputs[0] == outputs[1]
    assert {len(call.args[3].rows) for call in kernel.call_args_list} == {2}


def test_on_a_cpu_nothing_is_batched() -> None:
    assert not decode_trial.works(replace(CONFIG, device=CPU))


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (0.01, ""),
        (0.2, "its results are 0.2 off"),
        (RuntimeError("no C compiler"), "no C compiler"),
    ],
)
def test_kernels_that_fail_or_err_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, outcome: Any, message: str
) -> None:
    def largest_error(config: AttentionConfig) -> float:
        if isinstance(outcome, Exception):
            raise outcome
        return float(outcome)

    monkeypatch.setattr(decode_trial, "largest_error", largest_error)
    decode_trial.works.cache_clear()
    assert decode_trial.works(CONFIG) == (message == "")
    assert message in caplog.text and bool(caplog.text) == bool(message)
    caplog.clear()
    if message:
        with pytest.raises(KernelUnavailableError, match=message):
            GpuOperators(triton_required=True).prepare_batched_decode(CONFIG)
    else:
        assert GpuOperators(triton_required=True).prepare_batched_decode(CONFIG)
    assert not Operators().prepare_batched_decode(CONFIG)
    assert not caplog.text
    decode_trial.works.cache_clear()


def test_a_layer_without_a_kernel_leaves_it_to_the_others(tmp_path: Path, kernel: Mock) -> None:
    """Its sequences are attended one by one, with the same result."""
    folder = tiny_models.cached("gemma2", tmp_path)
    configs: list[AttentionConfig] = []

    class WithoutWindows(GpuOperators):
        def prepare_batched_decode(self, config: AttentionConfig) -> bool:
            configs.append(config)
            return config.params.window is None

    outputs = []
    for operators in (Operators(), WithoutWindows()):
        runner = build_runner(
            folder, dtype="float32", block_size=4, num_blocks=8, operators=operators
        )
        specs = [SamplerSpec(0, RankSampling(temperature=0.0), 0)]
        prompt = SequenceStep(0, list(range(9)), 0, [3, 1, 2], True)
        first = runner.execute(StepPlan.of(0, [prompt], specs)).sampled[0]
        second = SequenceStep(0, first, 9, [3, 1, 2], True)
        outputs.append(first + runner.execute(StepPlan.of(1, [second])).sampled[0])
    assert outputs[0] == outputs[1]
    batched = [getattr(layer.attention, "batched_decode", None) for layer in runner.model.layers]
    windows = [layer.attention.params.window for layer in runner.model.layers]  # type: ignore[union-attr]
    assert batched == [window is None for window in windows] and runner.batched_decode
    assert kernel.call_count == sum(batched) and 0 < sum(batched) < len(batched)
    assert len(configs) == 2  # once for each kind


def test_the_trial_finds_wrong_kernels(kernel: Mock) -> None:
    config = replace(CONFIG, device=CPU)
    assert decode_trial.largest_error(config) == 0.0
    for kind in (
        replace(config, params=AttentionParams(0.3, window=7)),
        replace(config, params=AttentionParams(0.3, soft_cap=2.0)),
        replace(config, params=AttentionParams(0.3, window=7, sinks=True)),
        replace(config, cache_dtype=torch.float8_e4m3fn),
        replace(config, cache_dtype=torch.int8),
    ):
        assert decode_trial.largest_error(kind) == 0.0
    kernel.side_effect = lambda *arguments, **_: arguments[5].fill_(torch.nan)
    assert decode_trial.largest_error(config) > 1.0
