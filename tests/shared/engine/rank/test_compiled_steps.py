"""Steps with kernels that are compiled on CPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tandem.kernels.cpu import jit

pytest.importorskip("numba")
jit.prepare()
if not jit.multiplies_bytes():
    pytest.skip("the CPU has no AVX2", allow_module_level=True)

from numba.core.dispatcher import Dispatcher  # noqa: E402

from tandem.kernels.cpu.operators import CompiledOperators  # noqa: E402
from tandem.shared.engine.plan import (  # noqa: E402
    RankSampling,
    SamplerSpec,
    SequenceStep,
    StepPlan,
)
from tandem.tests.support.checkpoints import tiny_models  # noqa: E402
from tandem.tests.support.runners import build_runner  # noqa: E402


def compiled_kernels() -> dict[str, int]:
    """The number of types that each kernel was compiled for."""
    return {
        f"{name}.{kernel.py_func.__name__}": len(kernel.signatures)
        for name, module in [*sys.modules.items()]
        if name.startswith(f"{jit.__package__}.")
        for kernel in vars(module).values()
        if isinstance(kernel, Dispatcher)
    }


def test_no_step_waits_for_the_compiler(tmp_path: Path) -> None:
    runner = build_runner(
        tiny_models.cached("qwen3", tmp_path),
        dtype="float32",
        kv_dtype="float16",
        isq="q8_0",
        block_size=4,
        num_blocks=32,
        operators=CompiledOperators(),
    )
    before = compiled_kernels()
    specs = [SamplerSpec(number, RankSampling(temperature=0.0), number) for number in range(2)]
    prompts = [torch.arange(3, size).tolist() for size in (9, 20)]
    tables = [range(8), range(8, 16)]
    chunks, ends = [], []
    for number, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        chunks.append(SequenceStep(number, prompt, 0, [*table], True))
        ends.append(SequenceStep(number, [number], len(prompt), [*table], True))
    for step, rows in enumerate((chunks, ends, ends[:1])):
        result = runner.execute(StepPlan.of(step, rows, specs if step == 0 else []))
        assert not result.failed
    assert compiled_kernels() == before
