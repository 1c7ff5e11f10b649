"""GPUs, drivers, Triton and NCCL that cannot be used: each is an error that names it."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem import EngineConfig
from tandem.kernels.gpu import trials
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.engine import device as engine_device
from tandem.shared.engine.device import usable_decode_kernel
from tandem.shared.engine.formats import formats_for
from tandem.shared.engine.messages import LoadFormats
from tandem.shared.engine.rank import group, loading
from tandem.shared.engine.rank.device import open_device
from tandem.shared.engine.rank.group import meet
from tandem.shared.errors import StartupError
from tandem.shared.kv.planning import RankDevice
from tandem.shared.weights.source import read_spec
from tandem.tests.support.fake_cuda import FakeCuda, settings

# As torch raises them.
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: http://x Alternatively, go "
    "to: https://pytorch.org to install a PyTorch version that has been compiled with your version "
    "of the CUDA driver."
)
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed "
    "a driver from http://x"
)


@pytest.mark.parametrize(
    ("error", "visible", "words"),
    [
        (OLD_DRIVER, None, r"is too old \(found version 11040\); update it, or install a torch"),
        (NO_DRIVER, None, "Found no NVIDIA driver on your system; nvidia-smi must list a GPU"),
        (
            "No CUDA GPUs are available",
            "",
            r"No CUDA GPUs are available \(CUDA_VISIBLE_DEVICES is ''\); name GPUs there that",
        ),
        (
            "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
            "calling NumCudaDevices() that might have already set an error? Error 802: system not "
            "yet initialized",
            None,
            "cuda: Error 802: system not yet initialized; NVIDIA's fabric manager must run",
        ),
        ("No CUDA GPUs are available", "7", r"available \(CUDA_VISIBLE_DEVICES is '7'\); name"),
    ],
)
def test_the_reason_why_torch_sees_no_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, error: str, visible: str | None, words: str
) -> None:
    def init() -> None:
        raise RuntimeError(error)

    def is_available() -> bool:  # warnings are no second line on stderr
        warnings.warn(f"CUDA initialization: {error}", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(StartupError, match=rf"^--device .*{words}.*, or use --device cpu$"):
        open_device(settings("cuda"))


@pytest.mark.parametrize("warning", [OLD_DRIVER, ""])
def test_a_cpu_instead_of_a_gpu_that_cannot_be_used_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, warning: str
) -> None:
    def is_available() -> bool:
        if warning:
            warnings.warn(f"CUDA initialization: {warning} (Triggered at x.cpp:1)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert open_device(settings("auto")).type == "cpu"
    expected = (
        "the CPU computes, because no GPU can be used: The NVIDIA driver on your system is too old "
        "(found version 11040)"
    )
    assert [each.message for each in caplog.records] == ([expected] if warning else [])


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            "CUDA error: no kernel image is available for execution on the device\nSearch for",
            r"torch \S+ is built for sm_75 sm_90: install another build",
        ),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA", "see nvidia-smi"),
        ("CUDA error: uncorrectable ECC error encountered", "see nvidia-smi"),
    ],
)
def test_a_gpu_that_does_not_compute_is_refused_by_name(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, error: str, remedy: str
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError(error)

    cuda.capability = (6, 1)
    monkeypatch.setattr(engine_device, "_add_on", fail)
    reason = re.escape(error.splitlines()[0])
    expected = (
        rf"^GPU 1 \(Fake 1, compute capability 6\.1\) cannot be used: {reason}; {remedy}.*--d"
    )
    with pytest.raises(StartupError, match=expected):
        open_device(settings("auto", 1))


# ---- Triton ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "error", "reason"),
    [
        ((6, 1), None, r"it needs compute capability 7\.0, and this GPU has 6\.1"),
        ((9, 0), RuntimeError("Failed to find C compiler"), "RuntimeError: Failed to find C comp"),
        ((9, 0), ImportError("x.so: failed to map segment"), "ImportError: x.so: failed to map"),
        ((9, 0), 7, "a kernel that it compiles writes a wrong number"),
    ],
)
def test_triton_that_cannot_be_used_is_refused_or_done_without(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    error: Exception | int | None,
    reason: str,
) -> None:
    def probe(device: torch.device) -> int:
        if isinstance(error, Exception):
            raise error
        assert error is not None, "the compiler may abort the process"
        return error

    monkeypatch.setattr(trials, "capability_of", lambda device: capability)
    monkeypatch.setattr(engine_device, "description", lambda device: "GPU 0 (Fake)")
    monkeypatch.setitem(
        sys.modules, "tandem.kernels.gpu.triton_probe", SimpleNamespace(probe=probe)
    )
    device = torch.device("cuda", 0)
    with pytest.raises(
        StartupError,
        match=rf"^Triton cannot be used on GPU 0 \(Fake\): {reason}.*C compiler.*torch",
    ):
        usable_decode_kernel(device, "triton")
    assert not caplog.records
    assert usable_decode_kernel(device, "torch") == usable_decode_kernel(device, "auto") == "torch"
    (line,) = [each.message for each in caplog.records]
    assert re.match(rf"torch computes all steps, slowly .*, because Triton .*: {reason}", line)


@pytest.mark.usefixtures("cuda")
def test_a_rank_that_needs_triton_loads_no_model_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_device, "triton_problem", lambda device: "no C compiler")
    needing = settings("cuda", decode_kernel="triton")
    with pytest.raises(StartupError, match=r"^Triton cannot be used on GPU 0 .*: no C compiler;"):
        loading.load_model(needing, LoadFormats("float32", "float32"), torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_triton_itself_says_why_it_cannot_be_used() -> None:
    pytest.importorskip("triton")
    assert "CUDA" in trials.triton_problem(torch.device("cuda", 0))


# ---- ranks that meet -------------------------------------------------------------------------

NCCL = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, \
unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Bootstrap : no socket interface found
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NCCL, "NCCL 2.27.5: unhandled system error: Bootstrap : no socket interface found; "),
        (
            "NCCL error in: ../NCCLUtils.hpp:219, unhandled cuda error, NCCL version 2.19.3",
            "NCCL 2.19.3: unhandled cuda error; ",
        ),
        ("Timed out after 61 seconds waiting for clients. 1/2 clients joined.", "Timed out after"),
    ],
)
@pytest.mark.parametrize("rendezvous", ["file:///store", "tcp://127.0.0.1:1"])
def test_nccl_that_cannot_start_gives_its_last_error_and_the_time(
    monkeypatch: pytest.MonkeyPatch, error: str, reason: str, rendezvous: str
) -> None:
    def join(backend: str, **arguments: Any) -> None:
        raise RuntimeError(error)

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    monkeypatch.setattr(group, "_meeting", lambda settings: {})
    with pytest.raises(StartupError) as failure:
        meet(settings("cuda", size=2, rank=1, rendezvous=rendezvous), torch.device("cuda", 1))
    message = str(failure.value)
    assert re.match(rf"rank 1 did not meet the other 1 at {rendezvous}, after 0\.\d s: ", message)
    assert reason in message
    assert "NCCL_P2P_DISABLE=1" in message and "\n" not in message
    assert ("the hosts must reach each other" in message) == rendezvous.startswith("tcp")


def test_nccl_that_waits_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(group, "LIMIT_SECONDS", 0.1)
    monkeypatch.setattr(group, "_begin", lambda settings, device: release.wait())
    with pytest.raises(
        StartupError, match=r"after 0\.\d s: nccl still waits for a rank; NCCL_DEBUG"
    ):
        meet(settings("cuda", size=2, rendezvous="file:///store"), torch.device("cuda", 0))
    release.set()


# ---- dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, LoadFormats("float16", "float16")),
        ({"kv_cache_dtype": "fp8"}, LoadFormats("float16", "float8_e4m3fn")),
        ({"dtype": "float32"}, LoadFormats("float32", "float32")),
        ({"dtype": "bfloat16"}, "--dtype bfloat16 needs .* 8.0, which GPU 0 .* --dtype float16"),
        ({"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16 needs .*-dtype float16"),
    ],
)
def test_a_gpu_without_bfloat16_computes_in_float16(
    options: dict[str, str], expected: LoadFormats | str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = replace(read_spec(builtin_model_path()), dtype="bfloat16")
    config = EngineConfig(model="m", **options)  # type: ignore[arg-type]
    new = RankDevice("cuda", "GPU 1 (H100, compute capability 9.0)", 1, 1, (9, 0))
    old = RankDevice("cuda", "GPU 0 (T4, compute capability 7.5)", 1, 1, (7, 5))
    if isinstance(expected, str):
        with pytest.raises(StartupError, match=expected):
            formats_for(config, spec, [new, old])
    else:
        assert formats_for(config, spec, [new, old]) == expected
        assert ("GPU 0 (T4, compute capability 7.5) has no" in caplog.text) == (
            "dtype" not in options
        )
    assert formats_for(EngineConfig(model="m"), spec, [new]).dtype == "bfloat16"
