"""Whole models with experts and latents, whose kernels Triton interprets, against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.kernels.operators import Operators
from tandem.shared.engine.plan import SequenceStep, StepColumns
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.tests.support.batches import last_rows
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.extent import selected
from tandem.tests.support.runners import build_runner

pytest.importorskip("triton")

from tandem.kernels.gpu import decode_trial, grouped_experts, latent_trial, routing_trial
from tandem.kernels.gpu.operators import GpuOperators

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for CPUs")

BLOCK = 16
# Widths that the kernels of experts can read.
WIDE = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
LOCAL = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}


def logits_of(folder: Path, operators: Operators, kv_dtype: str) -> torch.Tensor:
    """Of rows of prompts, some in chunks beside rows that decode."""
    runner = build_runner(
        folder, dtype="float32", kv_dtype=kv_dtype, num_blocks=64, operators=operators
    )
    assert runner.batched_decode == isinstance(operators, GpuOperators)
    tables = [[3, 1, 2], [8, 9, 6]]
    steps: list[list[tuple[int, int, int]]] = [[(0, 0, 20)], [(0, 20, 1), (1, 0, 18)]]
    steps.append([(0, 21, 1), (1, 18, 5)])
    found = [_step(runner, [(i, a, n, tables[i]) for i, a, n in rows]) for rows in steps]
    return torch.cat(found)


def _step(runner: ModelRunner, rows: list[tuple[int, int, int, list[int]]]) -> torch.Tensor:
    sequences = [
        SequenceStep(number, [(7 * (start + i)) % 50 for i in range(count)], start, table, True)
        for number, start, count, table in rows
    ]
    with torch.inference_mode():
        batch = runner.inputs.batch(StepColumns.of(sequences), last_rows(sequences)).forward
        logits = runner.model.logits(runner.model.forward(batch, runner.cache.kv))
    assert logits is not None
    return logits


CASES = [
    ("deepseek_v2", WIDE, "auto"),
    ("deepseek_v3", WIDE, "int8"),
    ("gpt_oss", LOCAL, "auto"),
]
MORE = [
    ("deepseek_v3", WIDE, "auto"),
    ("qwen3_moe", WIDE, "auto"),
    ("glm4_moe", WIDE, "auto"),
    ("mixtral", LOCAL, "auto"),
]


@pytest.mark.parametrize(("name", "changes", "kv_dtype"), selected(CASES, full=MORE))
def test_logits_are_those_of_the_reference(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    changes: dict[str, Any],
    kv_dtype: str,
) -> None:
    for trial in (grouped_experts, routing_trial, decode_trial):
        monkeypatch.setattr(trial, "works", lambda *_, **__: True)
    for what in ("stores", "decodes", "takes_chunks"):
        monkeypatch.setattr(latent_trial, what, lambda *_, **__: True)
    # Programs without work, which the interpreter takes in turn.
    monkeypatch.setattr("tandem.kernels.gpu.split_rule.MAX_SPLITS", 2)
    tiny_models.build(name, tmp_path, **changes)
    ours, theirs = (logits_of(tmp_path, each, kv_dtype) for each in (GpuOperators(), Operators()))
    torch.testing.assert_close(ours, theirs, atol=2e-4 if kv_dtype == "auto" else 2e-2, rtol=1e-4)
