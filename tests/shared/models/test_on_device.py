"""Whole models on a GPU, against the same ones on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tandem.kernels.operators import Operators
from tandem.shared.engine.plan import RankSampling, SamplerSpec, SequenceStep, StepPlan
from tandem.shared.engine.rank.graphs import Capture, cuda_capture
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.tests.support.batches import build_batch
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.emulated_gpu import (
    emulated_runner,
    use_cuda_stand_ins,
    use_kernels,
)
from tandem.tests.support.emulation import EMULATED
from tandem.tests.support.packed_kv import packed_bytes
from tandem.tests.support.runners import build_runner, paddings_of, written_slots
from tandem.tests.support.step_plans import Streams, drawn, drawn_late

HERE = torch.cuda.is_available()
NO_GPU = pytest.mark.skipif(not HERE and not EMULATED, reason="no CUDA device")
GPU = [pytest.param("cuda", marks=NO_GPU)]
# One of each kind is enough to see the code run.
FEW = 1 if EMULATED and not HERE else None
EVERY = [*tiny_models.MODELS, *tiny_models.WRAPPED] if HERE else ["qwen3"]
NAMES = pytest.mark.parametrize("name", ["mistral", "qwen3", "deepseek_v3"][:FEW])
FORMATS = pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "int8")]
    if FEW
    else [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8"), ("bfloat16", "int8")],
)
PROMPTS = [list(range(5)), [9] * 300, [7, 8] * 50]
STEPS, CHUNK, BLOCK, LAUNCHES = 6, 64, 16, 100
SIZES = [2, 4]  # of graphs for up to four rows
if FEW:
    PROMPTS, STEPS, CHUNK, LAUNCHES = [[1, 2], [9] * 12], 2, 8, 3


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code, on a GPU that is emulated."""
    if EMULATED and not HERE:
        use_kernels(monkeypatch.setattr)
        use_cuda_stand_ins(monkeypatch.setattr)


def capture() -> Capture:
    if HERE:
        return cuda_capture()
    from tandem.tests.support.graph_emulator import emulated_capture

    return emulated_capture


def greedy_tokens(runner: ModelRunner) -> list[list[int]]:
    """Greedy tokens of all prompts in one batch: prefilled in chunks, some while others decode."""
    tokens = [list(prompt) for prompt in PROMPTS]
    computed = [0] * len(tokens)
    tables = [list(range(first, first + 40))[::-1] for first in range(0, 120, 40)][: len(tokens)]
    specs = [SamplerSpec(i, RankSampling(temperature=0.0), 0) for i in range(len(tokens))]
    step = 0
    while any(len(all_) < len(p) + STEPS for all_, p in zip(tokens, PROMPTS, strict=True)):
        rows = []
        for i, values in enumerate(tokens):
            part = values[computed[i] : computed[i] + CHUNK]
            whole = computed[i] + len(part) == len(values)
            rows.append(SequenceStep(i, part, computed[i], tables[i], whole))
            computed[i] += len(part)
        for key, more in runner.execute(StepPlan.of(step, rows, specs)).sampled.items():
            tokens[key].extend(more)
        specs, step = [], step + 1
    ends = zip(tokens, PROMPTS, strict=True)
    return [values[len(p) : len(p) + STEPS] for values, p in ends]


def runner_on(
    device: str,
    folder: Path,
    dtype: str = "float32",
    kv_dtype: str = "auto",
    isq: str | None = None,
    **more: Any,
) -> ModelRunner:
    options: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 120, "isq": isq, **more}
    options["kv_dtype"] = kv_dtype
    if device == "cuda" and not HERE:
        return emulated_runner(folder, **options)
    return build_runner(folder, dtype=dtype, device=device, **options)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("device", GPU)
def test_greedy_tokens_do_not_depend_on_the_device(tmp_path: Path, name: str, device: str) -> None:
    folder = tiny_models.cached(name, tmp_path)
    assert greedy_tokens(runner_on(device, folder)) == greedy_tokens(runner_on("cpu", folder))


@NAMES
@FORMATS
@pytest.mark.parametrize("device", GPU)
def test_graphs_draw_what_their_kernels_draw_alone(
    tmp_path: Path, name: str, dtype: str, kv_dtype: str, device: str
) -> None:
    """Also with padding, since a sequence's numbers depend on no other row, nor but for rounding
    on their number. Experts in float32 wait for the device, so there are no graphs."""
    experts: dict[str, Any] = {}
    if name == "deepseek_v3":  # an odd width has no kernel
        experts["moe_intermediate_size"] = 32
    tiny_models.build(name, tmp_path, **experts)
    eager, captured = (runner_on(device, tmp_path, dtype, kv_dtype) for _ in range(2))
    captured.capture_graphs(capture(), SIZES)
    paddings = paddings_of(captured)
    plans = [*Streams(3, block_size=BLOCK, max_rows=3).plans(min(40, LAUNCHES))]
    assert drawn_late(captured, plans) == [drawn(eager.execute(plan)) for plan in plans]
    assert written_slots(captured) == written_slots(eager), "padding was written to the cache"
    assert (captured.graphs is None) == bool(experts and dtype == "float32")
    assert any(paddings) == (captured.graphs is not None)


@pytest.mark.parametrize("device", GPU)
def test_launches_wait_for_nothing(tmp_path: Path, device: str) -> None:
    runner = runner_on(device, tiny_models.cached("qwen3", tmp_path), "bfloat16")
    runner.capture_graphs(capture(), SIZES)
    before, *plans = Streams(3, block_size=BLOCK, max_rows=3).plans(LAUNCHES)
    runner.execute(before)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps = [runner.launch(plan) for plan in plans]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(not runner.collect(step).failed for step in steps)


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Of rows that decode, with random KV before them."""
    generator = torch.Generator().manual_seed(0)
    for side in (side for layer in runner.cache.layers for side in layer):
        side.copy_(torch.randn(side.shape, generator=generator))
    rows = [SequenceStep(i, [5 + i], 40, list(range(3 * i, 3 * i + 3)), True) for i in range(25)]
    with torch.inference_mode():
        batch = build_batch(rows, BLOCK, runner.cache.device, batched_decode=runner.batched_decode)
        logits = runner.model.logits(runner.model.forward(batch, runner.cache.kv))
    assert logits is not None
    return logits.float().cpu()


@pytest.mark.parametrize("isq", [None, "q2k", "q3k", "q4k", "q5k", "q6k", "q8_0", "fp8"][:FEW])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss"][:FEW])
@pytest.mark.parametrize("device", GPU)
def test_products_of_a_model_are_those_of_the_reference(
    tmp_path: Path, name: str, isq: str | None, device: str
) -> None:
    """In bfloat16, with experts in one launch. The reference multiplies in float32."""
    changes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    if name == "qwen3_moe":
        changes |= {"moe_intermediate_size": 256}
    tiny_models.build(name, tmp_path, **changes)
    exact = logits_of(runner_on(device, tmp_path, isq=isq, operators=Operators()))
    ours = logits_of(runner_on(device, tmp_path, "bfloat16", isq=isq)) - exact
    reference = runner_on(device, tmp_path, "bfloat16", isq=isq, operators=Operators())
    theirs = logits_of(reference) - exact
    # Of most rows: rounding sends some to other experts. An emulated GPU computes in float32.
    assert ours.std(1).median() < 2 * theirs.std(1).median() + 1e-5


def test_greedy_tokens_are_the_same_again_without_a_gpu(tmp_path: Path) -> None:
    """So that what the others do is tried everywhere."""
    folder = tiny_models.cached("mistral", tmp_path)
    tokens = greedy_tokens(runner_on("cpu", folder))
    assert [len(each) for each in tokens] == [STEPS] * len(PROMPTS)
    assert tokens == greedy_tokens(runner_on("cpu", folder))


@NAMES
@FORMATS
@pytest.mark.parametrize("device", GPU)
def test_no_attention_writes_all_scores_out(
    tmp_path: Path, name: str, dtype: str, kv_dtype: str, device: str
) -> None:
    runner = runner_on(device, tiny_models.cached(name, tmp_path), dtype, kv_dtype)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        greedy_tokens(runner)


@FORMATS
@pytest.mark.parametrize("device", GPU)
def test_decode_and_chunks_are_batched(
    tmp_path: Path, dtype: str, kv_dtype: str, device: str
) -> None:
    runner = runner_on(device, tiny_models.cached("gemma2", tmp_path), dtype, kv_dtype)
    assert runner.batched_decode
    for layer in runner.model.layers:
        assert layer.attention.batched_decode and layer.attention.batched_chunks


@pytest.mark.parametrize(
    ("name", "kv_dtype", "isq"), [("gemma2", "fp8", None), ("qwen3_moe", "auto", "q8_0")][:FEW]
)
@pytest.mark.parametrize("device", GPU)
def test_no_step_compiles_a_kernel(
    tmp_path: Path,
    device: str,
    name: str,
    kv_dtype: str,
    isq: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = pytest.importorskip("triton")
    runner = runner_on(device, tiny_models.cached(name, tmp_path), "bfloat16", kv_dtype, isq)
    compilations: list[str] = []
    hook = lambda *, fn, **_: compilations.append(fn.name)  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    greedy_tokens(runner)
    assert not compilations


@pytest.mark.parametrize("device", GPU)
def test_a_forward_pass_never_waits_for_the_device(tmp_path: Path, device: str) -> None:
    runner = runner_on(device, tiny_models.cached("qwen3", tmp_path), "bfloat16")
    rows = [SequenceStep(i, [5], 40, list(range(3 * i, 3 * i + 3)), True) for i in range(4)]
    rows.append(SequenceStep(4, [5] * 20, 0, [100, 101], True))
    with torch.inference_mode():
        batch = build_batch(rows, BLOCK, runner.cache.device, batched_decode=runner.batched_decode)
        runner.model.logits(runner.model.forward(batch, runner.cache.kv))
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(LAUNCHES):
                runner.model.logits(runner.model.forward(batch, runner.cache.kv))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@FORMATS
@pytest.mark.parametrize("device", ["cpu", *GPU])
def test_kv_leaves_a_cache_and_enters_another_of_the_same_device(
    tmp_path: Path, dtype: str, kv_dtype: str, device: str
) -> None:
    folder = tiny_models.cached("qwen3", tmp_path)
    full, empty = (runner_on(device, folder, dtype, kv_dtype).cache for _ in range(2))
    for side in full.layers[0]:
        side.copy_(torch.randn(side.shape).clamp(-9, 9))
    there, here = list(range(0, 60, 3)), list(range(119, 99, -1))
    for place in ("cpu", full.device):
        buffer = torch.zeros(packed_bytes(full, 0, 300), dtype=torch.uint8, device=place)
        full.pack(0, there, 5, 305, buffer)
        empty.scatter(0, here, 5, 305, buffer)
        again = torch.empty_like(buffer)
        empty.pack(0, here, 5, 305, again)
        assert torch.equal(buffer, again) and buffer.any()
