"""Kernels, allocations, copies and host waits of steps on a GPU, counted without one.

The figures below are ceilings: work that makes a step cheaper lowers them. Without Triton the tests
are skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.shared.engine.plan import (
    RankSampling,
    SamplerSpec,
    SequenceStep,
    StepColumns,
    StepPlan,
)
from tandem.shared.engine.rank import sampler_choice
from tandem.tests.support.batches import last_rows
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.runners import build_runner

pytest.importorskip("triton")

from tandem.kernels.gpu import (
    chunk_trial,
    decode_trial,
    flash_attention,
    grouped_experts,
    latent_trial,
    routing_trial,
    sampling,
)
from tandem.kernels.gpu.operators import GpuOperators
from tandem.shared.engine.rank.gpu_sampler import GpuSampler
from tandem.tests.support.meta_gpu import (
    META,
    DeviceWork,
    OnGpu,
    Recorder,
    Uploads,
    runner_on_gpu,
)

VOCABULARY = 2000
ATTENTION = ("_list_splits", "_attend")
# Of a step: the first position of each sequence, and its rows.
Rows = Sequence[tuple[int, int]]


def decode_step(folder: Path, kv_dtype: str, rows: int = 4) -> tuple[DeviceWork, list[int]]:
    """The work of a forward pass and head over rows that decode, and how many kernels had been
    launched when each layer had written its KV."""
    return step(folder, kv_dtype, [(40, 1)] * rows)


def step(folder: Path, kv_dtype: str, rows: Rows) -> tuple[DeviceWork, list[int]]:
    """The same over any sequences."""
    return steps(folder, kv_dtype, rows)[0]


def steps(folder: Path, kv_dtype: str, *rows: Rows) -> list[tuple[DeviceWork, list[int]]]:
    """The same for each of several steps."""
    counted = list[tuple[DeviceWork, list[int]]]()
    with runner_on_gpu(folder, kv_dtype) as (runner, work):
        for each in rows:
            work.clear()
            marks = list[int]()
            sequences = sequences_of(each)
            with torch.inference_mode(), Uploads(work), Recorder(work):
                batch = runner.inputs.batch(StepColumns.of(sequences), last_rows(sequences)).forward
                hidden = runner.model.forward(
                    batch,
                    runner.cache.kv,
                    lambda _: marks.append(len(work.kernels)),  # noqa: B023
                )
                logits = runner.model.logits(hidden)
            assert logits is not None and logits.shape[0] == len(sequences)
            counted.append((replace(work, kernels=[*work.kernels]), marks))
    return counted


def sequences_of(rows: Rows) -> list[SequenceStep]:
    return [
        SequenceStep(i, [5] * count, start, [*range((start + count) // 16 + 1)], True)
        for i, (start, count) in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("name", "kv_dtype", "per_layer", "outside"),
    [
        *(("qwen3", kv_dtype, (9, 13), (7, 10)) for kv_dtype in ("auto", "fp8", "int8")),
        *(("llama", kv_dtype, (9, 13), (7, 10)) for kv_dtype in ("auto", "fp8", "int8")),
        # Attention and feed-forward are normed before they are added; a second list of splits.
        ("gemma2", "auto", (11, 15), (12, 17)),
    ],
)
def test_work_of_a_decode_step(
    model_root: Path,
    name: str,
    kv_dtype: str,
    per_layer: tuple[int, int],
    outside: tuple[int, int],
) -> None:
    """Kernels and allocations, which no number of rows and no position changes. The forward pass
    itself never waits: the recorder raises where it would."""
    cases = [(40, 1)] * 4, [(5000, 1)] * 4, [(40, 1)], [(40, 1)] * 17, [(40, 1)] * 256
    counted = steps(tiny_models.cached(name, model_root), kv_dtype, *cases)
    work, marks = counted[0]
    assert all(each == (work, marks) for each in counted)
    # Splits are listed once for all layers.
    layers = [work.kernels[begin:end] for begin, end in pairwise(marks)]
    kernels, allocations = per_layer
    assert max(len(each) - each.count("_list_splits") for each in layers) <= kernels
    assert len(work.kernels) <= kernels * len(marks) + outside[0]
    assert work.allocations <= allocations * len(marks) + outside[1]
    attention = Counter(name for name in work.kernels if name in ATTENTION)
    windows = 2 if name == "gemma2" else 1
    assert (attention["_list_splits"], attention["_attend"]) == (windows, len(marks))
    assert (work.uploads, work.downloads) == (1, 0)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_work_of_a_whole_step(
    model_root: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """From the plan to the tokens: one copy each way, and a graph in the place of the layers."""
    monkeypatch.setattr(sampler_choice, "works", lambda *_: True)
    with runner_on_gpu(tiny_models.cached("qwen3", model_root), "auto") as (runner, work):
        if graphs:
            runner.capture_graphs(
                lambda forward: (lambda: work.kernels.append("graph"), forward()), [1, 32]
            )
        params = RankSampling(temperature=0.8)
        specs = [SamplerSpec(row, params, row) for row in range(17)]
        runner.launch(StepPlan.of(0, sequences_of([(39, 1)] * 17), specs, []))
        counted = list[DeviceWork]()
        for number, rows in enumerate(([(40, 1)] * 4, [(5000, 1)] * 4, [(41, 1)] * 17), 1):
            work.clear()
            with Uploads(work), Recorder(work):
                runner.launch(StepPlan.of(number, sequences_of(rows), [], []))
            counted.append(replace(work, kernels=[*work.kernels]))
    assert counted == [work] * 3
    assert work.uploads == work.downloads == 1
    assert len(work.kernels) <= (7 if graphs else 36)
    assert work.allocations <= (8 if graphs else 54)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mistral"])
def test_chunks_take_as_many_launches_however_many_there_are(model_root: Path, name: str) -> None:
    """And no layer uploads anything: gemma2 has more kinds of layers than qwen3."""
    folder = tiny_models.cached(name, model_root)
    chunk, decode = (7, 9), (40, 1)
    steps = [step(folder, "auto", each) for each in ([chunk], [chunk] * 5, [chunk, decode] * 3)]
    one, many, mixed = (work for work, _ in steps)
    (_, marks), *_ = steps
    assert one.kernels == many.kernels and one.kernels.count("_attend_chunks") == len(marks)
    assert mixed.kernels.count("_attend_chunks") == mixed.kernels.count("_attend") == len(marks)
    assert one.uploads == many.uploads == mixed.uploads == 1


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_flash_attention_takes_as_many_launches_however_many_chunks_there_are(
    model_root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A layer has one, and the first layer computes what all of them pass."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("torch has no attention over blocks")
    folder = tiny_models.cached(name, model_root)
    chunk, decode = (7, 9), (40, 1)
    cases = [chunk], [chunk] * 5, [chunk, decode] * 3
    plain, *_ = (step(folder, "auto", each)[0] for each in cases)
    monkeypatch.setattr(flash_attention, "works", lambda _: True)
    monkeypatch.setattr(OnGpu, "prepare_batched_chunks", GpuOperators.prepare_batched_chunks)
    works, marks = zip(*(step(folder, "auto", each) for each in cases), strict=True)
    one, many, mixed = works
    assert one.kernels == many.kernels
    for work in works:
        assert work.kernels.count("_varlen_attn_out") == len(marks[0])
        assert "_attend_chunks" not in work.kernels and work.uploads == 1
    assert mixed.kernels.count("_attend") == len(marks[0])
    assert len(one.kernels) <= len(plain.kernels) + 7


def test_experts_take_as_many_launches_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And wait for nothing."""
    monkeypatch.setattr(grouped_experts, "works", lambda *_: True)
    counts = []
    for experts in (8, 24):
        folder = tmp_path / str(experts)
        tiny_models.build("qwen3_moe", folder, num_experts=experts, moe_intermediate_size=32)
        work, marks = decode_step(folder, "auto")
        own = ["_route", "_choose", "_plan", "_multiply_plain", "_multiply_plain", "_add_weighted"]
        assert [name for name in work.kernels if name in own] == own * len(marks)
        counts.append(len(work.kernels))
    assert counts[0] == counts[1] <= 13 * len(marks) + 7


@pytest.fixture
def latents_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stores", "decodes", "takes_chunks"):
        monkeypatch.setattr(latent_trial, name, lambda *_, **__: True)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_latents_take_as_many_launches_however_many_sequences_there_are(
    model_root: Path, latents_by_triton: None, kv_dtype: str
) -> None:
    """And wait for nothing."""
    folder = tiny_models.cached("deepseek_v3_dense", model_root)
    counts = []
    for rows in (3, 12):
        work, marks = decode_step(folder, kv_dtype, rows)
        own = ["_store_latents", "_attend_latents"]
        assert [name for name in work.kernels if name in own] == own * len(marks)
        assert work.kernels.count("_list_splits") == 1
        counts.append(len(work.kernels))
    assert counts[0] == counts[1] <= 13 * len(marks) + 8


@pytest.mark.parametrize(
    ("name", "experts", "changes"),
    [
        ("qwen3_moe", "num_experts", {"moe_intermediate_size": 32}),
        ("gpt_oss", "num_local_experts", {"intermediate_size": 32, "hidden_size": 64}),
        ("deepseek_v3", "n_routed_experts", {"moe_intermediate_size": 32, "hidden_size": 64}),
    ],
)
def test_prompts_of_experts_take_as_many_launches_however_many_there_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    latents_by_triton: None,
    name: str,
    experts: str,
    changes: dict[str, Any],
) -> None:
    """Neither more experts nor more sequences take more, and the host waits for nothing."""
    for trial in (grouped_experts, routing_trial):
        monkeypatch.setattr(trial, "works", lambda *_: True)
    kernels = []
    for count in (8, 24):
        folder = tmp_path / str(count)
        tiny_models.build(name, folder, **changes | {experts: count})
        kernels += [step(folder, "auto", [(7, 9)] * chunks)[0].kernels for chunks in (1, 6)]
    assert all(each == kernels[0] for each in kernels)
    assert {"_choose", "_plan", "_multiply_plain", "_add_weighted"} <= set(kernels[0])


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
def test_chunks_over_latents_take_as_many_launches_however_many_there_are(
    model_root: Path, latents_by_triton: None, kv_dtype: str
) -> None:
    """And wait for nothing, also behind a prefix and beside rows that decode."""
    folder = tiny_models.cached("deepseek_v3_dense", model_root)
    chunk, decode = (7, 9), (40, 1)
    steps = [step(folder, kv_dtype, each) for each in ([chunk], [chunk] * 5, [chunk, decode] * 3)]
    one, many, mixed = (work for work, _ in steps)
    (_, marks), *_ = steps
    own = ["_store_latents", "_attend_latent_chunks"]
    assert one.kernels == many.kernels
    assert [name for name in one.kernels if name in own] == own * len(marks)
    assert len(one.kernels) <= 13 * len(marks) + 8
    both = [name for name in mixed.kernels if "latent" in name]
    assert both == [own[0], "_attend_latents", own[1]] * len(marks)
    assert one.uploads == many.uploads == mixed.uploads == 1


@pytest.mark.parametrize(
    ("params", "kernels"),
    [
        ({"temperature": 0.0}, 2),
        ({"temperature": 0.8}, 2),
        ({"temperature": 0.8, "top_p": 0.9}, 6),
        ({"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.1}, 6),
        ({"top_p": 0.9, "frequency_penalty": 0.5, "bad_words": ((1, 2),)}, 6),
        ({"temperature": 0.8, "logprobs": 5}, 19),
        ({"temperature": 0.8, "logprobs": 0, "logprob_token_ids": (3, 4)}, 12),
    ],
    ids=["greedy", "temperature", "top-p", "all filters", "edits", "logprobs", "listed"],
)
def test_kernels_of_sampling(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], kernels: int
) -> None:
    """New sequences and masks bring one upload and one kernel more, each sequence with lists one of
    its own, and nothing waits: the recorder raises where it would."""
    work = DeviceWork()
    monkeypatch.setattr(
        type(sampling._draw),
        "run",
        lambda kernel, *_, **__: work.kernels.append(kernel.fn.__name__),
    )
    slots = list(range(4))
    slots_R = torch.empty(4, dtype=torch.int32, device=META)
    logits = torch.empty(4, VOCABULARY, device=META)
    sampler = GpuSampler(VOCABULARY, torch.empty(9, dtype=torch.int32, device=META))
    for slot in slots:
        sampler.add(slot, SamplerSpec(slot, RankSampling(**params), slot))

    def drawn(masks: dict[int, bytes]) -> list[str]:
        work.kernels, work.uploads, work.downloads = [], 0, 0
        with torch.inference_mode(), Uploads(work), Recorder(work):
            sampler.draw(slots_R, slots, logits, masks)
        return work.kernels

    first, uploads = drawn({}), work.uploads
    later = drawn({})
    added = len(slots) if "bad_words" in params else 1
    assert first == ["_set"] * added + later and uploads == added
    assert len(later) <= kernels
    asks = "logprobs" in params
    assert (work.uploads, work.downloads) == (asks, 1 + asks)
    masked = drawn({2: bytes(VOCABULARY // 8)})
    assert {*masked} == {*later, "_set"} and work.uploads == 1


def test_logprobs_of_prompts_bring_no_wait_and_no_upload(
    model_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of two prompts, beside a stream: more positions than are computed at a time."""
    monkeypatch.setattr(sampler_choice, "works", lambda *_: True)
    prompt = [5] * 50
    specs = [SamplerSpec(number, RankSampling(temperature=0.0), 0) for number in range(3)]
    with runner_on_gpu(tiny_models.cached("qwen3", model_root)) as (runner, work):
        uploads = []
        for tops in ((None, None), (3, 0)):
            rows = [SequenceStep(2, [5], 9, [9], True)]
            for number, top in enumerate(tops):
                targets = tuple(prompt[1:]) if top is not None else ()
                blocks = list(range(4 * number, 4 * number + 4))
                rows.append(SequenceStep(number, prompt, 0, blocks, True, top, targets))
            work.uploads = 0
            with Uploads(work), Recorder(work):
                launched = runner.launch(StepPlan.of(1, rows, specs, [0, 1, 2]))
            uploads.append(work.uploads)
    assert uploads[0] == uploads[1]
    logprobs = runner.collect(launched).prompt_logprobs
    assert {key: [len(one.top) for one in each] for key, each in logprobs.items()} == {
        0: [3] * 49,
        1: [0] * 49,
    }


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
def test_a_runner_of_the_tests_computes_with_what_a_rank_computes_with(
    model_root: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    """Or tests and benchmarks on a GPU would be of something else."""
    monkeypatch.setattr(decode_trial, "works", lambda config, **_: True)
    monkeypatch.setattr(sampler_choice, "works", lambda *_: True)
    monkeypatch.setattr(chunk_trial, "works", lambda config: True)
    cudnn: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", cudnn.append)
    folder = tiny_models.cached("gemma2", model_root)
    runner = build_runner(
        folder, kv_dtype=kv_dtype, device=META, num_blocks=64, load_format="dummy"
    )
    assert isinstance(runner.model.place.operators, GpuOperators)
    assert isinstance(runner.sampler, GpuSampler)
    assert runner.batched_decode
    for layer in runner.model.layers:
        assert layer.attention.batched_decode and layer.attention.batched_chunks
    assert cudnn == [False]


@pytest.mark.parametrize("wait", ["item", "tolist", "nonzero", "cpu"])
def test_a_wait_in_the_forward_pass_would_be_found(wait: str) -> None:
    with (
        pytest.raises(AssertionError, match="the host waits for the device"),
        Recorder(DeviceWork()),
    ):
        getattr(torch.ones(3, device=META).sum(), wait)()
