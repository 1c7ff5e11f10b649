"""The device of a rank: which one, its settings in torch, and the operators that compute on it.

Also used by tests and benchmarks that compute without a rank's process.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import warnings

import torch

from ...kernels.cpu import jit
from ...kernels.errors import KernelUnavailableError
from ...kernels.gpu.trials import triton_problem
from ...kernels.operators import Operators
from ..errors import StartupError, brief
from ..kv.planning import CPU, CUDA
from ..version import install_command
from .device_memory import description

log = logging.getLogger("tandem.node")


def choose_device(name: str, index: int) -> torch.device:
    """The device of ``--device``, prepared. Raises ``StartupError``."""
    if name == CPU:
        return torch.device(CPU)
    available, problem = _cuda()
    if not available and name == "auto":
        if problem:
            log.warning("the CPU computes, because no GPU can be used: %s", problem)
        return torch.device(CPU)
    if not available:
        raise StartupError(f"--device cuda: {_no_cuda()}, or use --device cpu")
    count = torch.cuda.device_count()
    if index >= count:
        only = f"only {count} in all{_visible()}"
        raise StartupError(f"there is no CUDA device {index}, {only}; see --d")
    device = torch.device(CUDA, index)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old GPUs: whether this one computes counts
            torch.cuda.set_device(index)
            _add_on(device)
    except RuntimeError as error:
        raise StartupError(_unusable(device, error)) from None
    prepare(device)
    return device


def _cuda() -> tuple[bool, str]:
    """True if torch can use a GPU; the problem if there is one that it cannot use, because of the
    driver for instance."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    return available, _first(caught[0].message) if caught else ""


def _no_cuda() -> str:
    """The reason why torch has no CUDA device, and what to do."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is built without CUDA; install a build that has it "
            f"(make serve TORCH_INDEX=)"
        )
    reason = "this torch sees no CUDA device"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = _first(error)
    if "too old" in reason:
        remedy = f"update it, or install a torch for its CUDA instead of {torch.__version__}"
    elif "Error 802" in reason:
        remedy = "NVIDIA's fabric manager must run on machines with NVSwitch"
    elif _visible():
        remedy = "name GPUs there that nvidia-smi lists"
    else:
        remedy = "nvidia-smi must list a GPU"
    return f"{reason}{_visible()}; {remedy}"


def _visible() -> str:
    """The value of CUDA_VISIBLE_DEVICES in parentheses, if it is set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f" (CUDA_VISIBLE_DEVICES is {brief(value)})"


def _add_on(device: torch.device) -> None:
    """Launch one of torch's kernels. Raises ``RuntimeError`` on a GPU that this torch is not built
    for, or that is broken or another process's."""
    torch.ones(1, device=device).add_(1).item()


def _unusable(device: torch.device, error: RuntimeError) -> str:
    """The message for a GPU that torch sees but cannot use."""
    reason = _first(error)
    if "no kernel image" in reason:
        built = " ".join(torch.cuda.get_arch_list())
        remedy = f"torch {torch.__version__} is built for {built}: install another build"
    else:
        remedy = "see nvidia-smi for its state and what uses it"
    return (
        f"{description(device)} cannot be used: {reason}; {remedy}, name another GPU with --d, or "
        f"use --device cpu"
    )


def _first(error: Exception | Warning | str) -> str:
    """The first sentence of a message of torch's, which may be followed by advice and a stack."""
    line = (str(error).splitlines() or [""])[0].partition(" (Triggered")[0]
    if numbered := re.search(r"Error \d+: .*", line):  # after questions about the cause
        return numbered[0]
    return re.split(r"\. (?=[A-Z])", line)[0].removeprefix("CUDA initialization: ").rstrip(".")


def prepare(device: torch.device) -> None:
    """Configure torch for this device."""
    if device.type == CPU:
        return
    # cuDNN's attention, which torch prefers on the newest GPUs, is planned anew for each length:
    # half a second for every token of a stream.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # The attention of chunks uses it, and it loads torch's compiler: now rather than in a step.
    importlib.import_module("torch.nn.attention.bias")


def operators_for(
    device: torch.device, *, cpu_kernels: str = "torch", decode_kernel: str = "auto"
) -> Operators:
    """The operators of ``--cpu-kernels`` and ``--decode-kernel``, ready to run. Raises
    ``StartupError``."""
    if cpu_kernels == "torch":
        if device.type == CPU or decode_kernel == "torch":
            return Operators()
        # Only now, since it imports Triton.
        from ...kernels.gpu.operators import GpuOperators

        return GpuOperators(triton_required=decode_kernel == "triton")
    if device.type != CPU:
        raise StartupError(f"--cpu-kernels {cpu_kernels} is for CPUs, and this rank is on {device}")
    try:
        jit.prepare()
    except KernelUnavailableError as error:
        raise StartupError(
            f"--cpu-kernels {cpu_kernels}: {error}; they need {install_command('cpu')} and the "
            f"system's libgomp (Debian: libgomp1); or use --cpu-kernels torch"
        ) from None
    from ...kernels.cpu.operators import CompiledOperators

    return CompiledOperators()


def usable_decode_kernel(device: torch.device, decode_kernel: str) -> str:
    """``--decode-kernel``, or torch if Triton compiles no kernel that runs on this GPU, which is
    logged. Raises ``StartupError`` if Triton is required."""
    if decode_kernel == "torch" or not (reason := triton_problem(device)):
        return decode_kernel
    why = f"Triton cannot be used on {description(device)}: {reason}"
    if decode_kernel == "triton":
        raise StartupError(
            f"{why}; it needs a C compiler, Python's headers, and libraries loaded from "
            f"TRITON_CACHE_DIR or ~/.triton (writable, no noexec); or use --decode-kernel torch, "
            f"which is slow in large batches"
        )
    log.warning("torch computes all steps, slowly in large batches, because %s", why)
    return "torch"
