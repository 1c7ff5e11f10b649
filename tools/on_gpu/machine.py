"""Description of the GPU machine, and probes of what it supports:

    python -m tandem.tools.on_gpu.machine --out DIR [--device emulation]

Versions come first, then probes: each tests something that later parts rely on, and the results go
to ``machine.json``. Probes that could disturb the process come last. A failed probe is a result,
not an error.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tandem.shared.handoff.carriers.device import DeviceDriver, DeviceError
from tandem.shared.handoff.carriers.memfd import open_memfd

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "tokenizers",
    "numpy",
    "msgpack",
    "msgspec",
    "pyzmq",
    "xxhash",
    "grpcio",
    "protobuf",
    "fastapi",
    "pydantic",
    "uvicorn",
    "pytest",
    "pytest-asyncio",
    "hypothesis",
)
CUDA, EMULATION = "cuda", "emulation"
MIB = 1 << 20
MEMORY = "probe"
_PIDFD_GETFD = 438


class NeedsGpuError(Exception):
    """The probe needs a real GPU."""


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def describe(device: str) -> None:
    """Print versions and the GPU."""
    print(f"Python {platform.python_version()} on {platform.platform()}")
    print(", ".join(f"{package} {installed(package)}" for package in PACKAGES))
    if device != CUDA:
        return
    if (tool := shutil.which("nvidia-smi")) is not None:
        fields = "name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit"
        command = [tool, f"--query-gpu={fields}", "--format=csv,noheader"]
        subprocess.run(command, check=False, timeout=30)
    free, total = torch.cuda.mem_get_info()
    capability = torch.cuda.get_device_capability()
    print(
        f"{torch.cuda.get_device_name()}, sm_{capability[0]}{capability[1]}, "
        f"{free // MIB} of {total // MIB} MiB free, CUDA {torch.version.cuda}",
        flush=True,
    )


# ---- the probes ----------------------------------------------------------------------------------


def copies(device: str) -> str:
    """The speed of a copy within the GPU."""
    size = 1024 * MIB if device == CUDA else MIB
    source = torch.ones(size, dtype=torch.uint8, device=_torch(device))
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), device)
    return f"{2 * size / seconds / 1e12:.3g} TB/s, read and written"


def products(device: str) -> str:
    """The speed of a product in bfloat16."""
    size = 8192 if device == CUDA else 64
    a, b = torch.randn(2, size, size, device=_torch(device)).bfloat16()
    seconds = _seconds(lambda: a @ b, device)
    return f"{2 * size**3 / seconds / 1e12:.3g} TFLOP/s"


def graphs(device: str) -> str:
    """Capture of a graph, and its replay on other values, with an event after it."""
    _only_on_gpu(device)
    x = torch.ones(1000, device="cuda")
    x.mul(2)  # loads the kernel, which a capture cannot
    torch.cuda.synchronize()
    graph, done = torch.cuda.CUDAGraph(), torch.cuda.Event()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x * 2
    x.fill_(3)
    graph.replay()
    done.record()
    done.synchronize()
    assert bool((y == 6).all()), y
    return "captured and replayed"


def segments(device: str) -> str:
    """The allocator's expandable segments, which need the driver's virtual memory."""
    _only_on_gpu(device)
    torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").fill_(1)
    values = {segment.get("is_expandable", False) for segment in torch.cuda.memory_snapshot()}
    assert values == {True}, "PYTORCH_ALLOC_CONF asks for them, and torch has made none"
    return "used"


def fp8_attention(device: str) -> str:
    """Triton, and the decode kernel over a cache in fp8."""
    _only_on_gpu(device)
    from tandem.kernels.attention_metadata import AttentionConfig, AttentionParams
    from tandem.kernels.fp8 import FP8
    from tandem.kernels.gpu import decode_trial

    config = AttentionConfig(
        torch.device("cuda"), torch.bfloat16, FP8, 32, 8, 128, 16, AttentionParams(0.09)
    )
    start = time.monotonic()
    error = decode_trial.largest_error(config)
    assert error < decode_trial.limit(config), f"{error:g} off"
    from tandem.kernels.gpu.paged_decode import converts_fp8

    how = "by hardware" if converts_fp8() else "by bits"
    return f"{error:.2g} off, converted {how}, {time.monotonic() - start:.1f} s with compiling"


def quantized(device: str) -> str:
    """A product of 64 rows with quantised weights."""
    _only_on_gpu(device)
    from tandem.kernels.block_formats import Q8_0
    from tandem.kernels.gpu import quantized_trial

    error = quantized_trial.largest_error(Q8_0, torch.bfloat16, torch.device("cuda"), 64)
    assert error < quantized_trial.limit(torch.bfloat16), f"{error:g} off"
    return f"{error:.2g} off"


def pidfds(device: str) -> str:
    """A descriptor of another process."""
    with _owner(device, "descriptor") as (process, words):
        owner = os.pidfd_open(process.pid)
        try:
            library = ctypes.CDLL(None, use_errno=True)
            descriptor = library.syscall(_PIDFD_GETFD, owner, int(words[0]), 0)
            if descriptor < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            os.close(descriptor)
        finally:
            os.close(owner)
    return "taken"


def memory_files(device: str) -> str:
    """A memory file of another process, as carriers open it."""
    with _owner(device, "descriptor") as (process, words):
        descriptor = open_memfd(process.pid, int(words[0]), MEMORY)
        assert os.read(descriptor, 5) == b"hello"
        os.close(descriptor)
    return "opened"


def pinned(device: str) -> str:
    """A memory file that the GPU reads by itself."""
    driver = _driver(device)
    descriptor = os.memfd_create(MEMORY)
    os.ftruncate(descriptor, MIB)
    with mmap.mmap(descriptor, MIB) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        address = ctypes.addressof(view)
        driver.pin(address, MIB)
        driver.unpin(address)
        del view
    os.close(descriptor)
    return "pinned"


def ipc(device: str) -> str:
    """Copy another process's GPU memory while its owner is killed, then use the GPU again."""
    driver = _driver(device)
    with _owner(device, "memory") as (process, words):
        there = driver.open(bytes.fromhex(words[0]), 64 * MIB)
        here = driver.allocate(64 * MIB)
        driver.copy(here, there, 64 * MIB)
        driver.settle()
        values = torch.as_tensor(driver.array(here, 64 * MIB), device=_torch(device))
        assert bool((values == 7).all()), "the bytes are others"
        for number in range(20):
            if number == 5:
                process.kill()
            with contextlib.suppress(DeviceError):
                driver.copy(here, there, 64 * MIB)
                driver.settle()
        with contextlib.suppress(DeviceError):
            driver.close(there)
        driver.free(here)
    assert float(torch.ones(1000, device=_torch(device)).sum()) == 1000.0
    return "opened and copied; the GPU works after its owner was killed"


PROBES: dict[str, Callable[[str], str]] = {
    "copy": copies,
    "product": products,
    "graph": graphs,
    "segments": segments,
    "triton": fp8_attention,
    "quantized": quantized,
    "pidfd": pidfds,
    "memfd": memory_files,
    "pin": pinned,
    "ipc": ipc,
}


def _torch(device: str) -> torch.device:
    return torch.device("cuda" if device == CUDA else "cpu")


def _only_on_gpu(device: str) -> None:
    if device != CUDA:
        raise NeedsGpuError


def _seconds(work: Callable[[], Any], device: str) -> float:
    settle = torch.cuda.synchronize if device == CUDA else lambda: None
    for _ in range(3):
        work()
    settle()
    start = time.perf_counter()
    for _ in range(10):
        work()
    settle()
    return (time.perf_counter() - start) / 10


@cache
def _driver(device: str) -> DeviceDriver:
    """The initialised CUDA driver."""
    from tandem.tests.shared.handoff.support.fake_driver import FAKE, REAL, device_named

    if device == CUDA:
        torch.zeros(1, device="cuda")  # creates the context that both share
    driver = device_named(REAL if device == CUDA else FAKE).driver
    driver.enter(torch.cuda.current_stream().cuda_stream if device == CUDA else 0)
    return driver


# The code of a process with a descriptor that another process of this user may take. It needs no
# torch, unlike this module.
OWN_DESCRIPTOR = f"""
import os, sys
descriptor = os.memfd_create({MEMORY!r})
os.write(descriptor, b"hello")
print(descriptor, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def _owner(device: str, what: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Run a process that owns a resource inside the block; gives the words it prints about it."""
    command = [sys.executable, "-m", __spec__.name, "--own", what, "--device", device]
    if what == "descriptor":
        command = [sys.executable, "-c", OWN_DESCRIPTOR]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            words = process.stdout.readline().split()
            assert words, f"a process with {what} has ended"
            yield process, words
        finally:
            process.kill()


def own_memory(device: str) -> None:
    """Hold device memory for another process until the end of stdin."""
    driver = _driver(device)
    address = driver.allocate(64 * MIB)
    torch.as_tensor(driver.array(address, 64 * MIB), device=_torch(device)).fill_(7)
    if device == CUDA:
        torch.cuda.synchronize()
    print(driver.export(address).hex(), flush=True)
    sys.stdin.read()


def probe(device: str, out: Path) -> None:
    """Run all probes, print each result, and write them to a file."""
    results: dict[str, bool] = {}
    for name, ask in PROBES.items():
        try:
            detail = ask(device)
            results[name] = True
        except NeedsGpuError:
            print(f"probe {name}: left out, without a GPU", flush=True)
            continue
        except Exception as error:  # any failure is the result
            detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            results[name] = False
        print(f"probe {name}: {'yes' if results[name] else 'no'}: {detail}", flush=True)
        (out / "machine.json").write_text(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser("machine", description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=(CUDA, EMULATION), default=CUDA)
    parser.add_argument("--own", choices=("memory",), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own:
        own_memory(options.device)
        return
    if options.device == CUDA and not torch.cuda.is_available():
        print("no CUDA device")
        return
    describe(options.device)
    if options.out is not None:
        probe(options.device, options.out)


if __name__ == "__main__":
    main()
