"""A rank until its first step: its device, with a fake ``torch.cuda``, its group and its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from tandem.kernels.cpu import jit
from tandem.kernels.errors import KernelUnavailableError
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.engine.device import operators_for
from tandem.shared.engine.device_memory import report
from tandem.shared.engine.messages import AllocateCache, LoadFormats
from tandem.shared.engine.plan import SlotLimits, StepLimits
from tandem.shared.engine.rank import collector, graphs, loading, plane, process, step_profile
from tandem.shared.engine.rank.device import bind_threads, open_device
from tandem.shared.engine.rank.group import meet
from tandem.shared.errors import StartupError
from tandem.shared.kv.planning import RankDevice
from tandem.shared.models.parallel import TensorParallel
from tandem.shared.weights import load
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.kv_scales import NAMINGS, write_kv_scales
from tandem.tests.support.fake_cuda import GIB, FakeCuda, settings


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_the_gpu_is_opened_and_reported(cuda: FakeCuda, name: str) -> None:
    device = open_device(settings(name, 1))
    assert (device, cuda.current) == (torch.device("cuda", 1), 1)
    name = "GPU 1 (Fake 1, compute capability 9.0)"
    assert report(device) == RankDevice("cuda", name, 80 * GIB, 70 * GIB, (9, 0))


def test_attention_that_is_planned_for_each_length_is_not_used(cuda: FakeCuda) -> None:
    open_device(settings("cuda"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_ranks_meet_over_what_their_devices_have(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    met: dict[str, Any] = {}

    def join(backend: str, **arguments: Any) -> None:
        met.update(arguments, backend=backend)

    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: backend)
    device = torch.device(kind, 1)
    tp = meet(settings(kind, size=2, rank=1, rendezvous="file:///store"), device)
    assert (tp.rank, tp.size, tp.control) == (1, 2, "gloo")
    expected = ("nccl", device) if kind == "cuda" else ("gloo", None)
    assert (met["backend"], met["device_id"]) == expected


def test_a_gpu_that_is_not_there_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(StartupError, match=r"there is no CUDA device 2, only 2 in all; see --d"):
        open_device(settings("auto", 2))


def test_a_cpu_is_used_on_request(cuda: FakeCuda) -> None:
    assert open_device(settings("cpu")).type == "cpu"
    with pytest.raises(StartupError, match="--carrier cuda_ipc is not possible here"):
        open_device(settings("cpu", carrier="cuda_ipc"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    device = open_device(settings("auto"))
    memory = report(device)
    assert (device.type, memory.kind) == ("cpu", "cpu")
    assert 0 < memory.free_bytes <= memory.total_bytes
    with pytest.raises(StartupError, match=r"--device cuda: .*, or use --device cpu"):
        open_device(settings("cuda"))


def test_a_build_of_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(StartupError, match=r"torch .* is built without CUDA; install a build"):
        open_device(settings("cuda"))


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        ("cuda", torch.OutOfMemoryError("CUDA out of memory"), r"GPU 0 .* 70.0 of 80.0 GiB .* --d"),
        ("cpu", RuntimeError("DefaultCPUAllocator: can't allocate memory"), "CPU .* GiB are free;"),
    ],
)
def test_weights_that_do_not_fit_are_an_error_with_the_memory_that_there_is(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, device: str, error: Exception, words: str
) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(loading.load, "load_model", load)
    config = replace(settings(device), model_path=str(builtin_model_path()))
    formats = LoadFormats("float32", "float32")
    with pytest.raises(StartupError, match=rf"^the \d+\.\d MB of weights do not fit: {words}"):
        loading.load_model(config, formats, torch.device(device, 0))
    dummy = replace(config, load_format="dummy")
    with pytest.raises(StartupError, match=rf"^the weights do not fit: {words}"):
        loading.load_model(dummy, formats, torch.device(device, 0))


def test_compiled_kernels_are_refused_on_a_gpu() -> None:
    with pytest.raises(StartupError, match=r"--cpu-kernels compiled is for CPUs, .* cuda:1"):
        operators_for(torch.device("cuda", 1), cpu_kernels="compiled")


def test_compiled_kernels_without_numba_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> None:
        raise KernelUnavailableError("numba is missing")

    monkeypatch.setattr(jit, "prepare", missing)
    with pytest.raises(StartupError, match=r"numba is missing.*\.\[cpu\].*torch$"):
        operators_for(torch.device("cpu"), cpu_kernels="compiled")


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "bfloat16"])
def test_a_cache_in_fp8_has_the_scales_of_the_checkpoint(tmp_path: Path, kv_dtype: str) -> None:
    folder = tmp_path / "scaled"
    saved_scales = write_kv_scales(
        tiny_models.cached("qwen3", tmp_path), folder, NAMINGS["modelopt"]
    )
    config = replace(settings("cpu"), model_path=str(folder))
    formats = LoadFormats("float32", kv_dtype)
    cache = (
        loading.load_model(config, formats, torch.device("cpu")).runner(4, SlotLimits(1, 4)).cache
    )
    scales = [each.scale for layer in cache.layout for each in layer.values]
    expected = [scale for both in saved_scales for scale in both]
    assert scales == (expected if kv_dtype == "float8_e4m3fn" else [1.0] * len(expected))
    assert all(isinstance(each, torch.Tensor) for each in cache.kv[0]) == (kv_dtype == "bfloat16")


def test_a_gpu_that_cannot_run_the_decode_kernel_is_an_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise KernelUnavailableError("no C compiler")

    monkeypatch.setattr(loading, "runner_of", refuse)
    model = load.load_model(tiny_models.cached("qwen3", tmp_path), load_format="dummy")
    loaded = loading.LoadedModel(model, 16, torch.float32, TensorParallel())
    with pytest.raises(StartupError, match=r"no C compiler; .*--decode-kernel torch"):
        loaded.runner(4, SlotLimits(1, 4))


def test_no_memory_for_slots_beside_the_cache_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nGPU 0 has")

    monkeypatch.setattr(loading, "runner_of", full)
    model = load.load_model(tiny_models.cached("qwen3", tmp_path), load_format="dummy")
    loaded = loading.LoadedModel(model, 16, torch.float32, TensorParallel())
    with pytest.raises(StartupError, match=r"for 7 sequences: CUDA out of memory\.; lower"):
        loaded.runner(4, SlotLimits(7, 4))


@pytest.mark.parametrize("eager", [False, True])
def test_graphs_are_captured_before_the_data_plane_uses_the_gpu(
    monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    """``--enforce-eager`` captures none."""
    order, config = Mock(), settings("cuda", enforce_eager=eager)
    monkeypatch.setattr(graphs, "cuda_capture", lambda: "by CUDA")
    monkeypatch.setattr(plane, "start_data_plane", order.plane)
    monkeypatch.setattr(collector, "Collector", Mock())
    monkeypatch.setattr(process, "collect_rarely", Mock())
    rank = process.RankProcess(channel=Mock())
    rank._settings, rank._device = config, torch.device("cuda", 0)
    rank._model = order.model
    runner = order.model.runner.return_value
    runner.cache.device, runner.cache.mark = rank._device, None
    order.plane.return_value.endpoints = Mock(bulk="b", control="c", key=None)
    limits = SlotLimits(3, 4)
    assert rank._allocate(AllocateCache(9, limits)).endpoints is not None
    captured = [] if eager else [call.model.runner().capture_graphs("by CUDA", [1, 2, 3])]
    started = call.plane(config, runner.cache, rank._channel.send)
    assert order.mock_calls == [call.model.runner(9, limits), *captured, started]


@pytest.mark.parametrize("eager", [False, True])
def test_no_memory_is_left_for_graphs_that_are_not_captured(
    monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    profile = Mock(return_value=(0, 0))
    monkeypatch.setattr(step_profile, "profile", profile)
    monkeypatch.setattr(step_profile, "cuda_capture", lambda: "by CUDA")
    model = Mock(device=torch.device("cuda", 0), bytes_per_block=1)
    memory = Mock(free=lambda: GIB, reserved=lambda: GIB)
    opened = RankDevice("cuda", "a GPU", GIB, GIB)
    config, limits = settings("cuda", enforce_eager=eager), StepLimits(4, 2, 9)
    step_profile.memory_of(model, config, limits, opened, memory)
    profile.assert_called_once_with(
        model, limits, memory, None if eager else "by CUDA", shared=False
    )


@pytest.mark.parametrize(
    ("rank", "size", "threads", "kernels", "expected"),
    [
        (0, 1, 4, "compiled", [2, 3, 6, 7]),
        (0, 2, 2, "compiled", [2, 3]),
        (1, 2, 2, "compiled", [6, 7]),
        # Linux finds an idle core for threads, if there are fewer.
        (0, 1, 3, "compiled", None),
        (1, 4, 1, "compiled", None),
        (0, 1, 4, "torch", None),
    ],
)
def test_ranks_divide_the_cores_that_their_threads_fill(
    rank: int,
    size: int,
    threads: int,
    kernels: str,
    expected: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: list[list[int]] = []
    jit.prepare()
    from tandem.kernels.cpu import thread_cores

    monkeypatch.setattr(thread_cores, "usable_cores", lambda: [2, 3, 6, 7])
    monkeypatch.setattr(thread_cores, "bind", bound.append)
    config = settings("cpu", rank=rank, size=size, threads=threads, cpu_kernels=kernels)
    bind_threads(config, torch.device("cpu"))
    assert bound == ([] if expected is None else [expected])
