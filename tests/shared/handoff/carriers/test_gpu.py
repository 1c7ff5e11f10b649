"""The data plane's use of torch, on a CPU in place of a GPU, and on a real one."""

from __future__ import annotations

import random
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tandem.kernels.row_sums import row_sums
from tandem.kernels.streams import marker
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.engine.messages import DataPlaneSettings, RankSettings
from tandem.shared.engine.rank import plane
from tandem.shared.engine.rank.device import data_plane_bytes
from tandem.shared.errors import StartupError
from tandem.shared.handoff.carriers.cuda_ipc.cuda_driver import CudaDriver
from tandem.shared.handoff.carriers.cuda_ipc.torch_device import Gpu
from tandem.shared.handoff.carriers.device import DEVICE_BYTES, DeviceError
from tandem.shared.kv.cache import KVCache
from tandem.shared.weights.source import read_spec
from tandem.tests.shared.handoff.support.fake_driver import DEVICES, REAL, device_named
from tandem.tools.on_gpu import __main__ as on_gpu

MIB = 1 << 20
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("name", DEVICES)
def test_memory_is_seen_where_it_lies_and_summed_in_pieces(name: str) -> None:
    device = device_named(name)
    device.enter()
    address = device.driver.allocate(MIB)
    view = device.view(address, MIB)
    data = torch.frombuffer(bytearray(random.Random(1).randbytes(MIB)), dtype=torch.uint8)
    view.copy_(data)
    assert torch.equal(device.view(address, MIB).cpu(), data)
    for piece in (slice(0, MIB), slice(512, 99_999), slice(4096, 4097)):
        assert device.sums(view[piece]) == row_sums(data[piece]).numpy().tobytes()
    device.driver.free(address)
    device.leave()


def test_memory_on_a_gpu_is_reserved_for_the_data_plane_by_carrier() -> None:
    for carrier, expected in (("auto", DEVICE_BYTES), ("cuda_ipc", DEVICE_BYTES), ("tcp", 0)):
        assert data_plane_bytes(carrier, GPU) == expected
    assert data_plane_bytes("", GPU) == 0
    assert data_plane_bytes("auto", torch.device("cpu")) == 0


def test_a_gpu_without_cudas_driver_hands_over_through_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(ordinal: int) -> CudaDriver:
        raise DeviceError(f"there is no driver of GPU {ordinal}")

    monkeypatch.setattr(plane, "CudaDriver", missing)
    assert plane._gpu(GPU, "auto") is None
    assert "through the host: there is no driver of GPU 0" in caplog.text
    with pytest.raises(StartupError, match=r"--carrier cuda_ipc .* there is no driver of GPU 0"):
        plane._gpu(GPU, "cuda_ipc")


def test_the_planes_thread_uses_the_gpu_even_without_cudas_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = []

    def use(device: torch.device) -> None:
        used.append((threading.current_thread().name, device))

    monkeypatch.setattr(plane, "use_background_stream", use)
    here = DataPlaneSettings(
        node_id="node",
        epoch=1,
        host=None,
        port=0,
        staging_bytes=MIB,
        carrier="tcp",
        curve=False,
        max_peers=1,
    )
    cache = KVCache(
        read_spec(builtin_model_path()), num_blocks=1, block_size=16, dtype=torch.float32
    )
    started = plane.start_data_plane(
        RankSettings(model_path="", device="cpu", data_plane=here), cache, lambda event: None
    )
    started.stop()
    assert used == [("data-plane", cache.device)]


def test_nothing_of_it_exists_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert plane._gpu(cpu, "auto") is None and marker(cpu) is None


def test_the_run_on_a_gpu_names_files_that_exist() -> None:
    for part in on_gpu.PARTS:
        assert find_spec(part.module) is not None
        files = [each.format(root=on_gpu.ROOT) for each in part.arguments if "{root}" in each]
        assert [name for name in files if not Path(name).is_file()] == []


@NEEDS_GPU
def test_a_mark_is_passed_when_what_was_begun_before_it_is_over() -> None:
    mark = marker(GPU)
    assert mark is not None
    large = torch.ones(8192, 8192, device=GPU)
    for _ in range(20):
        large = large @ large * 0
    wait = mark()
    stream = torch.cuda.current_stream(GPU)
    assert not stream.query()
    wait()
    assert stream.query()


@NEEDS_GPU
def test_a_thread_that_entered_works_beside_the_computation() -> None:
    before = torch.cuda.current_stream()
    device = device_named(REAL)
    assert isinstance(device, Gpu)
    device.enter()
    try:
        assert torch.cuda.current_stream() != before
    finally:
        torch.cuda.set_stream(before)
        device.leave()
