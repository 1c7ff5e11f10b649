"""Kernels, uploads and host waits of steps on a GPU, counted without one.

Tensors are on torch's ``meta`` device, so the code takes a GPU's branches and computes nothing. The
figures below are ceilings: work that makes a step cheaper lowers them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.kernels.attention_metadata import (
    AttentionConfig,
    AttentionParams,
    ChunkMetadata,
    DecodeMetadata,
)
from tandem.kernels.gpu import chunk_trial, decode_trial, grouped_experts
from tandem.kernels.gpu.operators import GpuOperators
from tandem.kernels.scaled import CachedKV
from tandem.shared.engine.plan import RankSampling, SamplerSpec, SequenceStep
from tandem.shared.engine.rank.sampler import Sampler
from tandem.shared.models.batch import build_batch
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.runners import build_runner

META = torch.device("meta")
# Operators that only make room.
FREE = {"empty", "empty_strided", "empty_like", "new_empty", "detach_", "_unsafe_view"}
SCALARS = {"is_nonzero", "item", "_local_scalar_dense"}
VOCABULARY = 2000


@dataclass
class DeviceWork:
    """The work of one part of a step for the device."""

    kernels: list[str] = field(default_factory=list)
    uploads: int = 0
    waits: int = 0


class Uploads(TorchFunctionMode):
    """Counts tensors made of Python's numbers, which torch's dispatcher does not show."""

    def __init__(self, work: DeviceWork) -> None:
        super().__init__()
        self.work = work

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        self.work.uploads += func is torch.tensor and options.get("device") == META
        return func(*args, **options)


class Recorder(TorchDispatchMode):
    """Counts kernels. Refuses what the host would wait for, or answers it."""

    def __init__(self, work: DeviceWork, *, may_wait: bool = False) -> None:
        super().__init__()
        self.work = work
        self.may_wait = may_wait

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        name = func.overloadpacket.__name__
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        target = next((d for d in (*args, *options.values()) if isinstance(d, torch.device)), None)
        if source is not None and source.device == META:
            if name in SCALARS:
                self._wait(name)
                # Logits are finite, and top-p's first candidates suffice.
                return source.dtype != torch.bool or self.work.kernels[-1] == "all"
            if name == "nonzero" or (target is not None and target != META):
                self._wait(name)
                return torch.zeros(source.shape, dtype=options.get("dtype") or source.dtype)
        result = func(*args, **options)
        if source is not None and source.device != META and target == META:
            self.work.uploads += 1
        elif name not in FREE and (name.endswith("_") or not _shares_memory(result, source)):
            self.work.kernels.append(name)
            if name == "rms_norm" and source is not None and not source.is_contiguous():
                self.work.kernels.append("contiguous")
        return result

    def _wait(self, what: str) -> None:
        assert self.may_wait, f"the host waits for the device: {what}"
        self.work.waits += 1


def _shares_memory(result: Any, source: torch.Tensor | None) -> bool:
    """Return whether an operator returned its argument, or views of it."""
    results = result if isinstance(result, (list, tuple)) else [result]
    if source is None:
        return False
    storage = source.untyped_storage()._cdata
    return all(each.untyped_storage()._cdata == storage for each in results)


class OnGpu(GpuOperators):
    """Operators of a GPU with Triton."""

    def __init__(self, work: DeviceWork) -> None:
        super().__init__()
        self.work = work

    def prepare_batched_decode(self, config: AttentionConfig) -> bool:
        return True

    def decode_kernel(
        self,
        q_THD: torch.Tensor,
        keys_KND: CachedKV,
        values_KND: CachedKV,
        rows: DecodeMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        """``paged_decode``, which launches two kernels."""
        assert rows.rows.device == q_THD.device == META
        self.work.kernels += ["attend", "combine"]

    def prepare_batched_chunks(self, config: AttentionConfig) -> bool:
        return True

    def chunk_kernel(
        self,
        q_THD: torch.Tensor,
        keys_KND: CachedKV,
        values_KND: CachedKV,
        chunks: ChunkMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        """``chunk_attention``, which launches one kernel."""
        assert chunks.chunks.device == q_THD.device == META
        self.work.kernels.append("attend_chunks")


def decode_step(folder: Path, kv_dtype: str, rows: int = 4) -> tuple[DeviceWork, list[int]]:
    """The work of a forward pass and head over rows that decode, and how many kernels had been
    launched when each layer had written its KV."""
    return step(folder, kv_dtype, [(40, 1)] * rows)


def step(
    folder: Path, kv_dtype: str, sequences: Sequence[tuple[int, int]]
) -> tuple[DeviceWork, list[int]]:
    """The same over sequences with a first position and rows each."""
    work, marks = DeviceWork(), list[int]()
    runner = build_runner(
        folder,
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        device=META,
        num_blocks=64,
        load_format="dummy",
        operators=OnGpu(work),
    )
    assert runner.batched_decode
    steps = [
        SequenceStep(i, [5] * rows, start, [4 * i + j for j in range(4)], True)
        for i, (start, rows) in enumerate(sequences)
    ]
    ends = [sum(rows for _, rows in sequences[: i + 1]) - 1 for i in range(len(sequences))]
    with torch.inference_mode(), Uploads(work), Recorder(work):
        batch = build_batch(steps, 16, META, ends, batched_decode=True, batched_chunks=True)
        hidden = runner.model.forward(
            batch, runner.cache.layers, lambda _: marks.append(len(work.kernels))
        )
        logits = runner.model.logits(hidden)
    assert logits is not None and logits.shape[0] == len(sequences)
    return work, marks


def sampling(rows: int = 4, **params: Any) -> DeviceWork:
    """The work of drawing a token for each row."""
    work, sampler = DeviceWork(), Sampler(VOCABULARY, META)
    for number in range(rows):
        sampler.add(SamplerSpec(number, RankSampling(**params), number))
    logits = torch.empty(rows, VOCABULARY, device=META)
    with torch.inference_mode(), Uploads(work), Recorder(work, may_wait=True):
        sampler.sample(list(range(rows)), logits)
    return work


@pytest.mark.parametrize(
    ("name", "kv_dtype", "per_layer", "outside"),
    [
        ("qwen3", "auto", 22, 12),
        ("llama", "auto", 19, 12),
        ("qwen3", "fp8", 26, 12),
        ("llama", "fp8", 23, 12),
    ],
)
def test_kernels_of_a_decode_step(
    model_root: Path, name: str, kv_dtype: str, per_layer: int, outside: int
) -> None:
    """The forward pass itself never waits: the recorder raises where it would."""
    work, marks = decode_step(tiny_models.cached(name, model_root), kv_dtype)
    layers = {later - earlier for earlier, later in pairwise(marks)}
    assert layers and max(layers) <= per_layer
    assert len(work.kernels) <= per_layer * len(marks) + outside
    assert work.uploads <= 5


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mistral"])
def test_chunks_take_as_many_launches_however_many_there_are(model_root: Path, name: str) -> None:
    """And no layer uploads anything: gemma2 has more kinds of layers than qwen3."""
    folder = tiny_models.cached(name, model_root)
    chunk, decode = (7, 9), (40, 1)
    steps = [step(folder, "auto", each) for each in ([chunk], [chunk] * 5, [chunk, decode] * 3)]
    one, many, mixed = (work for work, _ in steps)
    (_, marks), *_ = steps
    assert one.kernels == many.kernels and one.kernels.count("attend_chunks") == len(marks)
    assert mixed.kernels.count("attend_chunks") == mixed.kernels.count("attend") == len(marks)
    assert one.uploads == many.uploads <= 4 and mixed.uploads <= 6


def test_experts_take_as_many_launches_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And wait for nothing. Counted are torch's, beside four of Triton for each layer."""
    grouped_product = pytest.importorskip("tandem.kernels.gpu.grouped_product")
    monkeypatch.setattr(grouped_experts, "works", lambda *_: True)
    launches: list[str] = []
    monkeypatch.setattr(
        type(grouped_product._add_weighted),
        "run",
        lambda kernel, *_, **__: launches.append(kernel.fn.__name__),
    )
    counts = []
    for experts in (8, 24):
        folder = tmp_path / str(experts)
        tiny_models.build("qwen3_moe", folder, num_experts=experts, moe_intermediate_size=32)
        launches.clear()
        work, marks = decode_step(folder, "auto")
        own = ["_plan", "_multiply_plain", "_multiply_plain", "_add_weighted"]
        assert [name for name in launches if name in own] == own * len(marks)
        counts.append(len(work.kernels))
    assert counts[0] == counts[1] <= 30 * len(marks) + 12


@pytest.mark.parametrize(
    ("params", "kernels", "waits"),
    [
        ({"temperature": 0.0}, 4, 2),
        ({"temperature": 0.8}, 14, 3),
        ({"temperature": 0.8, "top_p": 0.9}, 30, 4),
        ({"temperature": 0.8, "top_k": 20, "top_p": 0.9}, 39, 5),
    ],
    ids=["greedy", "temperature", "top-p", "top-k and top-p"],
)
def test_kernels_and_waits_of_sampling(params: dict[str, Any], kernels: int, waits: int) -> None:
    work = sampling(**params)
    assert len(work.kernels) <= kernels
    assert work.waits <= waits


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
def test_a_runner_of_the_tests_computes_with_what_a_rank_computes_with(
    model_root: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    """Or tests and benchmarks on a GPU would be of something else."""
    monkeypatch.setattr(decode_trial, "works", lambda config, **_: True)
    monkeypatch.setattr(chunk_trial, "works", lambda config: True)
    cudnn: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", cudnn.append)
    folder = tiny_models.cached("gemma2", model_root)
    runner = build_runner(
        folder, kv_dtype=kv_dtype, device=META, num_blocks=64, load_format="dummy"
    )
    assert isinstance(runner.model.place.operators, GpuOperators)
    assert runner.batched_decode and runner.batched_chunks
    for layer in runner.model.layers:
        assert layer.attention.batched_decode and layer.attention.batched_chunks  # type: ignore[union-attr]
    assert cudnn == [False]


@pytest.mark.parametrize("wait", ["item", "tolist", "nonzero", "cpu"])
def test_a_wait_in_the_forward_pass_would_be_found(wait: str) -> None:
    with (
        pytest.raises(AssertionError, match="the host waits for the device"),
        Recorder(DeviceWork()),
    ):
        getattr(torch.ones(3, device=META).sum(), wait)()
