"""Calls of CUDA's driver, to a small strict one in C, and to a real one."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.shared.handoff.carriers.cuda_ipc.cuda_driver import (
    HANDLE_BYTES,
    CudaDriver,
    cuda_of_driver,
    device_count,
)
from tandem.shared.handoff.carriers.device import DeviceError

SOURCE = Path(__file__).with_name("fake_cuda.c")
THE_DEVICE = 3
MIB = 1 << 20


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    built = tmp_path_factory.mktemp("cuda") / "libcuda.so"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(built), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return str(built)


# Of fake_cuda.c.
STREAM = 0x57


def outstanding(library: str) -> dict[str, int]:
    what = ("retained", "opened", "pinned", "allocated")
    return {name: getattr(ctypes.CDLL(library), f"fake_{name}")() for name in what}


@pytest.fixture
def driver(library: str) -> Iterator[CudaDriver]:
    driver = CudaDriver(THE_DEVICE, library)
    driver.enter(STREAM)
    yield driver
    driver.leave()
    assert set(outstanding(library).values()) == {0}


def test_a_device_is_known_by_its_uuid(library: str) -> None:
    expected = "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff"
    assert CudaDriver(THE_DEVICE, library).identity == expected


def test_memory_that_was_exported_is_copied_out_of_where_it_was_opened(driver: CudaDriver) -> None:
    theirs, ours = driver.allocate(5 * MIB), driver.allocate(3)
    mapping = driver.open(driver.export(theirs), 5 * MIB)
    ctypes.memmove(theirs + 4 * MIB, b"some KV", 7)
    driver.copy(ours, mapping + 4 * MIB, 7)
    driver.settle()
    assert ctypes.string_at(ours, 7) == b"some KV"
    driver.close(mapping)
    driver.free(theirs)
    driver.free(ours)


def test_torch_gets_the_address_of_mapped_memory(driver: CudaDriver) -> None:
    interface = driver.array(1 << 40, 99).__cuda_array_interface__
    assert interface == {"shape": (99,), "typestr": "|u1", "data": (1 << 40, False), "version": 3}


def test_memory_of_the_host_is_pinned_and_let_go(driver: CudaDriver, library: str) -> None:
    pages = mmap.mmap(-1, MIB)
    at = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    driver.pin(at, MIB)
    assert outstanding(library)["pinned"] == 1
    driver.unpin(at)


def test_every_refusal_is_named(driver: CudaDriver) -> None:
    with pytest.raises(DeviceError, match=r"cuMemAlloc_v2 of 2147483648 bytes failed: .*, out of"):
        driver.allocate(2 << 30)
    for handle in (bytes(HANDLE_BYTES), bytes(range(255, 255 - HANDLE_BYTES, -1))):
        with pytest.raises(DeviceError, match=r"cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_INVALID_"):
            driver.open(handle, 1)
    with pytest.raises(DeviceError, match="a handle of 63 bytes, not 64"):
        driver.open(bytes(63), 1)
    with pytest.raises(
        DeviceError, match=r"cuMemHostRegister_v2 of 5 bytes failed: CUDA_ERROR_INV"
    ):
        driver.pin(4097, 5)
    for function in (driver.free, driver.close, driver.export, driver.unpin):
        with pytest.raises(DeviceError, match=r"cu\w+ failed: CUDA_ERROR_INVALID_VALUE, something"):
            function(4097)
    with pytest.raises(DeviceError, match="cuMemcpyDtoDAsync_v2 failed"):
        driver.copy(1, 2, 3)


def test_a_ring_smaller_than_announced_is_not_opened(driver: CudaDriver, library: str) -> None:
    theirs = driver.allocate(MIB)
    with pytest.raises(DeviceError, match="the handle is for 2097152 bytes, not 2097153"):
        driver.open(driver.export(theirs), 2 * MIB + 1)
    assert outstanding(library)["opened"] == 0
    driver.free(theirs)


def test_an_unnamed_error_is_reported_by_its_number(library: str) -> None:
    driver = CudaDriver(THE_DEVICE, library)
    with pytest.raises(DeviceError, match="CUDA_ERROR_NO_DEVICE, something else"):
        CudaDriver(0, library)
    assert driver._text("cuGetErrorName", 205) == "error 205"


def test_without_a_driver_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"no usable CUDA driver: .*libnone\.so"):
        CudaDriver(0, str(tmp_path / "libnone.so"))
    with pytest.raises(DeviceError, match=r"no usable CUDA driver: .*cuInit"):
        CudaDriver(0, "libc.so.6")


def test_gpus_are_counted_by_the_driver_if_there_is_one(library: str, tmp_path: Path) -> None:
    assert device_count(library) == 4
    assert device_count(str(tmp_path / "libnone.so")) == 0
    assert device_count("libc.so.6") == 0


def test_the_driver_tells_its_version_of_cuda(library: str) -> None:
    assert cuda_of_driver(library) == (12, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_driver_copies_within_its_device() -> None:
    assert device_count() == torch.cuda.device_count()
    driver = CudaDriver(0)
    driver.enter(torch.cuda.current_stream(0).cuda_stream)
    theirs, ours = driver.allocate(MIB), driver.allocate(MIB)
    source, target = (
        torch.as_tensor(driver.array(at, MIB), device="cuda:0") for at in (theirs, ours)
    )
    source.copy_(torch.arange(MIB, device="cuda:0") % 251)
    torch.cuda.synchronize()
    driver.copy(ours, theirs, MIB)
    driver.settle()
    assert torch.equal(source, target)
    assert len(driver.export(theirs)) == HANDLE_BYTES
    for address in (theirs, ours):
        driver.free(address)
    driver.leave()
