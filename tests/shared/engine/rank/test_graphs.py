"""Graphs of decode steps, on an emulator: repeated at other lengths, tables and paddings, they give
what the same kernels give when they are launched one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.kernels.gpu import chunk_trial, decode_trial, fused_trial, step_inputs_trial
from tandem.kernels.gpu.operators import GpuOperators
from tandem.shared.engine.plan import (
    RankSampling,
    SamplerSpec,
    SequenceStep,
    StepColumns,
    StepPlan,
)
from tandem.shared.engine.rank.gpu_sampler import GpuSampler
from tandem.shared.engine.rank.graphs import graph_sizes
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.engine.rank.step_inputs import StepInputs
from tandem.shared.errors import StartupError
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.runners import build_runner
from tandem.tests.support.step_plans import NUM_BLOCKS, Streams, drawn

pytest.importorskip("triton")

from tandem.kernels.gpu import paged_decode
from tandem.tests.support.graph_emulator import CaptureError, emulated_capture

BLOCK = 4
MAX_ROWS = 3
TRIALS = (
    (decode_trial, "works"),
    (fused_trial, "norm_works"),
    (fused_trial, "activation_works"),
    (fused_trial, "rope_works"),
    (step_inputs_trial, "works"),
    (chunk_trial, "works"),
)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels on a CPU, as it interprets them."""
    for module, name in TRIALS:
        monkeypatch.setattr(module, name, lambda *_, **__: True)
    monkeypatch.setattr(paged_decode, "processors", lambda device: 1)  # programs are slow here
    monkeypatch.setattr(StepInputs, "_on_cpu", StepInputs._on_gpu)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.cached("qwen3", tmp_path_factory.mktemp("graphs"))


def runner_of(folder: Path) -> ModelRunner:
    """A runner on a CPU that computes all of a step as on a GPU."""
    runner = build_runner(
        folder, dtype="float32", block_size=BLOCK, num_blocks=NUM_BLOCKS, operators=GpuOperators()
    )
    runner.slots.tables = torch.zeros_like(runner.slots.tables)  # no longer the host's
    runner.sampler = GpuSampler(runner.model.spec.vocab_size, runner.slots.last_tokens)
    return runner


def test_sizes_of_graphs() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(4096)[-2:] == [504, 512]


def test_a_replay_is_what_its_kernels_give_alone(folder: Path) -> None:
    eager, captured = runner_of(folder), runner_of(folder)
    captured.capture_graphs(emulated_capture, max_rows=MAX_ROWS)
    assert captured.graphs is not None
    replayed = 0
    for plan in Streams(3, block_size=BLOCK, max_rows=MAX_ROWS).plans(12):
        rows = plan.sequences
        replayed += bool(rows) and StepColumns.of(rows).only_decode
        assert drawn(captured.execute(plan)) == drawn(eager.execute(plan))
    assert replayed >= 3
    for mine, theirs in zip(captured.cache.kv, eager.cache.kv, strict=True):
        for component, other in zip(mine, theirs, strict=True):
            assert isinstance(component, torch.Tensor) and isinstance(other, torch.Tensor)
            assert torch.equal(component, other), "padding was written to the cache"


def test_a_gpu_draws_the_tokens_of_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beside decoding rows, by the kernels of a GPU and by torch."""
    on_gpu = runner_of(folder)
    monkeypatch.undo()
    on_cpu = build_runner(folder, dtype="float32", block_size=BLOCK, num_blocks=NUM_BLOCKS)
    plans = list(Streams(5, block_size=BLOCK, max_rows=MAX_ROWS).plans(6))
    expected = [drawn(on_cpu.execute(plan)) for plan in plans]
    monkeypatch.setattr(paged_decode, "processors", lambda device: 1)
    monkeypatch.setattr(StepInputs, "_on_cpu", StepInputs._on_gpu)
    assert [drawn(on_gpu.execute(plan)) for plan in plans] == expected
    assert any(len(row.tokens) > 1 for plan in plans for row in plan.sequences)


def test_a_replay_announces_every_layer(folder: Path) -> None:
    runner = runner_of(folder)
    runner.capture_graphs(emulated_capture, max_rows=1)
    spec = SamplerSpec(1, RankSampling(temperature=0.0), 0)
    layers: list[int] = []
    runner.execute(StepPlan(1, [SequenceStep(1, [5], 0, [0], True)], [spec]), layers.append)
    assert layers == list(range(len(runner.model.layers)))


def test_a_capture_that_fails_ends_the_start_with_a_remedy(folder: Path) -> None:
    def capture(forward: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nGPU 0 has")

    runner = runner_of(folder)
    with pytest.raises(StartupError, match=r"Tried to allocate 2 GiB; use --enforce-eager, or"):
        runner.capture_graphs(capture, max_rows=1)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x: x + x.sum().item(), "waits for the device"),
        (lambda x: x + torch.tensor([1.0, 2.0]), "from the host"),
        (lambda x: x[x > 1], "waits for the device"),
    ],
    ids=["a wait", "an upload", "a size"],
)
def test_the_emulator_refuses_what_a_capture_forbids(
    forward: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    x = torch.ones(2)
    with pytest.raises(CaptureError, match=message):
        emulated_capture(lambda: forward(x))


def test_the_emulator_finds_numbers_of_the_captured_step() -> None:
    length, x = [3.0], torch.zeros(2)
    replay, out = emulated_capture(lambda: x + length[0])
    length[0] = 4.0
    replay()
    assert out.tolist() == [3.0, 3.0]
    x += 1
    replay()
    assert out.tolist() == [4.0, 4.0]
