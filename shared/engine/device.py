"""The device of a rank: which one, its settings in torch, and the operators that compute on it.

Also used by tests and benchmarks that compute without a rank's process.
"""

from __future__ import annotations

import importlib

import torch

from ...kernels.cpu import jit
from ...kernels.errors import KernelUnavailableError
from ...kernels.gpu.operators import GpuOperators
from ...kernels.operators import Operators
from ..errors import StartupError
from ..kv.planning import CPU, CUDA
from ..version import install_command


def choose_device(name: str, index: int) -> torch.device:
    """The device of ``--device``, prepared. Raises ``StartupError``."""
    if name == CPU or (name == "auto" and not torch.cuda.is_available()):
        return torch.device(CPU)
    if not torch.cuda.is_available():
        raise StartupError(f"--device cuda: {_no_cuda()}; use --device cpu")
    count = torch.cuda.device_count()
    if index >= count:
        raise StartupError(f"there is no CUDA device {index}, only {count} in all; see --d")
    device = torch.device(CUDA, index)
    torch.cuda.set_device(index)
    prepare(device)
    return device


def _no_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA; install one that has it"
    return "this torch sees no CUDA device"


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
