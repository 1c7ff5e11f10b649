"""The Triton kernel for a step's inputs against torch's: on a GPU if there is one, else as Triton
interprets it. Without Triton it is skipped."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.reference.step_inputs import stage_inputs as reference

pytest.importorskip("triton")

from tandem.kernels.gpu import step_inputs_trial
from tandem.kernels.gpu.step_inputs import stage_inputs
from tandem.kernels.gpu.step_inputs_trial import difference, works

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("rows", "changes"), [(1, 0), (256, 1), (257, 256), (700, 900)])
def test_rows_and_changes(rows: int, changes: int) -> None:
    random = torch.Generator().manual_seed(rows)
    inputs = torch.randint(-1, 9, (4, rows), generator=random, dtype=torch.int32)
    inputs[3].clamp_(min=0)
    places = torch.randperm(1000, generator=random)[:changes]
    changed = torch.stack([places, torch.arange(changes) + 7], 1).to(DEVICE, torch.int32)
    arguments = inputs.to(DEVICE), changed
    results = []
    for stage in (stage_inputs, reference):
        tables = torch.full((10, 100), -5, dtype=torch.int32, device=DEVICE)
        last = torch.arange(50, 59, dtype=torch.int32, device=DEVICE)
        # A wider buffer, as in a graph: what is outside stays.
        staged = torch.full((3, rows + 3), -7, dtype=torch.int64, device=DEVICE)
        stage(*arguments, tables, last, staged[:, :rows])
        results.append((tables, staged))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_the_trial_passes_here_and_is_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert difference(DEVICE) == ""
    assert not works(torch.device("cpu"))
    monkeypatch.setattr(step_inputs_trial, "difference", lambda device: "its inputs differ")
    works.cache_clear()
    assert not works(torch.device("meta"))
    works.cache_clear()
