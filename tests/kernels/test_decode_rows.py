"""Which rows are taken together, and what becomes of the others; the kernels have tests of their
own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.kernels import decode_rows as together
from tandem.kernels.decode_rows import DecodeRows, DecodeShape, UnusableError, decode_rows, works
from tandem.kernels.operators import TorchOperators
from tandem.kernels.reference import attention as reference
from tandem.kernels.reference.attention import SequenceContext
from tandem.shared.engine.plan import SamplerSpec, SamplingParams, SequenceStep, StepPlan
from tandem.tests import tiny_models
from tandem.tests.support.runners import build_runner

CPU = torch.device("cpu")
SHAPE = DecodeShape(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    heads=4,
    kv_heads=2,
    dim=8,
    window=None,
    block_size=16,
)


def test_of_each_decoding_row_the_table_has_its_number_its_length_and_its_blocks() -> None:
    contexts = [
        SequenceContext(slice(0, 1), 9, [7, 3, 5, 99], 4),
        SequenceContext(slice(1, 6), 0, [1, 2], 4),
        SequenceContext(slice(6, 7), 0, [8], 4),
    ]
    rows = decode_rows(contexts, CPU)
    assert rows is not None
    assert rows.table.tolist() == [[0, 10, 7, 3, 5], [6, 1, 8, 0, 0]]
    assert (rows.table.dtype, rows.longest, rows.block_size) == (torch.int32, 10, 4)


def test_a_step_of_chunks_has_none() -> None:
    assert decode_rows([SequenceContext(slice(0, 2), 0, [1], 4)], CPU) is None
    assert decode_rows([], CPU) is None


def one_by_one(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: DecodeRows,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """What the kernels do, from the table that they are given."""
    for row, length, *blocks in rows.table.tolist():
        context = SequenceContext(slice(row, row + 1), length - 1, blocks, rows.block_size)
        reference.paged_attention(q, keys, values, [context], window, out=out)


class FakeKernels:
    """Stands for the module whose import needs Triton."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[int] = []
        monkeypatch.setitem(__import__("sys").modules, "tandem.kernels.gpu.paged_decode", self)

    def paged_decode(self, *told: Any) -> None:
        self.seen.append(len(told[3].table))
        one_by_one(*told)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_a_model_gives_the_same_when_decoding_rows_are_taken_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    folder = tiny_models.cached(name, tmp_path)
    kernels = FakeKernels(monkeypatch)
    answers = []
    for at_once in (False, True):
        runner = build_runner(folder, dtype="float32", block_size=4, num_blocks=64)
        runner.decodes_together = at_once
        specs = [SamplerSpec(i, SamplingParams(temperature=0.0), 0, ()) for i in range(3)]
        prompts = [[5, 6, 7], list(range(30)), [9] * 17]
        tables = [[1, 40, 2], list(range(3, 13)), [50, 20, 30, 21, 22]]
        parts = zip(prompts, tables, strict=True)
        first = [SequenceStep(i, p, 0, t, True) for i, (p, t) in enumerate(parts)]
        drawn = runner.execute(StepPlan(0, first, specs)).sampled
        # One goes on with a chunk, the others decode.
        second = [
            replace(s, tokens=[d.token], start=len(s.tokens))
            for s, d in zip(first, drawn, strict=True)
        ]
        second[1] = replace(second[1], tokens=[drawn[1].token, 1, 2])
        drawn += runner.execute(StepPlan(1, second)).sampled
        answers.append([each.token for each in drawn])
    assert answers[0] == answers[1]
    assert kernels.seen and set(kernels.seen) == {2}


def test_on_a_cpu_nothing_is_taken_together() -> None:
    assert not works(replace(SHAPE, device=CPU))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (0.01, ""),
        (0.2, "its results are 0.2 off"),
        (RuntimeError("no C compiler"), "no C compiler"),
    ],
)
def test_kernels_that_fail_or_err_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: Any, said: str
) -> None:
    def largest_error(shape: DecodeShape) -> float:
        if isinstance(found, Exception):
            raise found
        return float(found)

    monkeypatch.setattr(together, "largest_error", largest_error)
    together.problem.cache_clear()
    assert works(SHAPE) == (said == "")
    assert said in caplog.text and bool(caplog.text) == bool(said)
    caplog.clear()
    if said:
        with pytest.raises(UnusableError, match=said):
            TorchOperators("triton").attends_together(SHAPE)
    else:
        assert TorchOperators("triton").attends_together(SHAPE)
    assert not TorchOperators("torch").attends_together(SHAPE)
    assert not caplog.text  # who chose it need not be warned
    together.problem.cache_clear()


def test_what_is_tried_finds_kernels_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = FakeKernels(monkeypatch)
    shape = replace(SHAPE, device=CPU)
    assert together.largest_error(shape) == 0.0
    for kind in (replace(shape, window=7), replace(shape, cache_dtype=torch.float8_e4m3fn)):
        assert together.largest_error(kind) == 0.0
    kernels.paged_decode = lambda *told: told[-1].fill_(torch.nan)  # type: ignore[method-assign]
    assert together.largest_error(shape) > 1.0
