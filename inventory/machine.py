"""``tandem info``: the devices, kernels and packages of this machine."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..shared.config import EngineConfig
from ..shared.engine.device import operators_for
from ..shared.engine.device_memory import report
from ..shared.errors import StartupError
from ..shared.handoff.carriers.cuda_ipc.cuda_driver import device_count
from ..shared.kv.planning import CPU, CUDA, RankDevice
from ..shared.process.threads import share_of_cores
from ..shared.version import install_command, version
from ..shared.weights.footprint import ParameterSize
from ..shared.weights.load import DTYPES
from ..shared.weights.transfer import in_words

# A package of each extra, which shows whether the extra is installed.
EXTRAS = {
    "serve": "grpc",
    "cpu": "numba",
    "kernels": "triton",
    "mcp": "mcp",
    "modelscope": "modelscope_hub",
    "nixl": "nixl",
    "otel": "opentelemetry.sdk",
}
# CPU features that our kernels and torch's use.
_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "sve",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of this machine, and a description of it."""

    cpu: RankDevice
    gpus: tuple[RankDevice, ...]
    about: dict[str, Any]


def this_machine(config: EngineConfig) -> Machine:
    """Examine this machine."""
    visible = device_count()
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cpu = report(torch.device(CPU))
    gpus = tuple(report(torch.device(CUDA, index)) for index in range(usable))
    model, features = _cpu()
    return Machine(
        cpu,
        gpus,
        {
            "version": version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cpu": {
                "model": model,
                "cores": share_of_cores(1),
                "features": features,
                "kernels": torch.backends.cpu.get_cpu_capability(),
            },
            "memory": {"total": cpu.total_bytes, "free": cpu.free_bytes},
            "gpus": [
                {"name": gpu.name, "total": gpu.total_bytes, "free": gpu.free_bytes} for gpu in gpus
            ],
            "gpus_without_torch": max(0, visible - usable),
            "extras": {name: _installed(package) for name, package in EXTRAS.items()},
            "kernels": kernels(config, on_gpu=bool(gpus)),
        },
    )


def kernels(config: EngineConfig, *, on_gpu: bool) -> dict[str, Any]:
    """The kernels that a server here would use, and on a CPU those that are available."""
    if on_gpu:
        triton = find_spec("triton") is not None and config.decode_kernel != "torch"
        return {"gpu": "triton" if triton else "torch"}
    compiled = "compiled" if find_spec("numba") else f"torch only; {install_command('cpu')}"
    return {"cpu": config.cpu_kernels, "cpu_available": compiled}


def kernels_of(
    config: EngineConfig, *, on_gpu: bool, multiplied: Iterable[ParameterSize], dtype: str
) -> dict[str, Any]:
    """The result of ``kernels``, and the kernel that multiplies each format of a model's parameters
    with activations of ``dtype``. Raises ``StartupError`` for kernels that cannot be used here."""
    used = kernels(config, on_gpu=on_gpu)
    device = torch.device(CUDA if on_gpu else CPU)
    formats = {each.blocks.name: each.blocks for each in multiplied if each.blocks is not None}

    def by_format(cpu_kernels: str, own: str) -> dict[str, str]:
        decode_kernel = "torch" if used.get("gpu") == "torch" else config.decode_kernel
        operators = operators_for(device, cpu_kernels=cpu_kernels, decode_kernel=decode_kernel)
        return {
            name: own if operators.has_product(format, DTYPES[dtype]) else "torch"
            for name, format in formats.items()
        }

    used["formats"] = by_format(config.cpu_kernels, used["gpu"] if on_gpu else config.cpu_kernels)
    if formats and used.get("cpu") == "torch" and used["cpu_available"] == "compiled":
        with suppress(StartupError):  # numba's library may not load
            used["formats_available"] = by_format("compiled", "compiled")
    return used


def as_text(machine: Machine) -> str:
    """A description of the machine as text."""
    about = machine.about
    cpu = about["cpu"]
    lines = [
        f"Tandem   {about['version']}, Python {about['python']}, torch {about['torch']}",
        f"CPU      {cpu['model']}, {cpu['cores']} cores usable ({', '.join(cpu['features'])}); "
        f"torch computes with {cpu['kernels']}",
        f"memory   {in_words(machine.cpu.free_bytes)} of {in_words(machine.cpu.total_bytes)} free",
    ]
    lines += [
        f"GPU      {gpu.name}, {in_words(gpu.free_bytes)} of {in_words(gpu.total_bytes)} free"
        for gpu in machine.gpus
    ] or ["GPU      none"]
    if unused := about["gpus_without_torch"]:
        lines.append(f"         {unused} more, which this build of torch cannot use")
    installed = [name for name, has_it in about["extras"].items() if has_it]
    missing = [name for name, has_it in about["extras"].items() if not has_it]
    lines.append(f"extras   {', '.join(installed) or 'none'}")
    if missing:
        lines.append(f"         not installed: {', '.join(missing)} ({install_command('NAME')})")
    lines.append(f"kernels  {in_sentence(about['kernels'])}")
    return "\n".join(lines)


def in_sentence(used: dict[str, Any]) -> str:
    """The kernels in words."""
    others = _in_torch(used, "formats")
    in_torch = f"; torch's for {others}" if others else ""
    if "gpu" in used:
        if used["gpu"] == "triton":
            return f"Triton's, compiled on the first start{in_torch}"
        return "torch's; Triton's need the extra kernels"
    if used["cpu"] == "compiled":
        return f"compiled ones, by numba{in_torch}"
    if used["cpu_available"] == "compiled":
        without = _in_torch(used, "formats_available")
        lacking = f", but none for {without} on this CPU" if without else ""
        return f"torch's; --cpu-kernels compiled has faster ones{lacking}"
    return f"torch's; --cpu-kernels compiled needs {install_command('cpu')}"


def _in_torch(used: dict[str, Any], key: str) -> str:
    """The formats that torch multiplies."""
    formats = [name for name, kind in used.get(key, {}).items() if kind == "torch"]
    return " and ".join(formats) if len(formats) < 3 else ", ".join(formats)


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _cpu() -> tuple[str, list[str]]:
    """The CPU's name, and the relevant ones of its features."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), []
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    features = set(flags[1].split()) if flags else set()
    return (name[1] if name else platform.machine()), [f for f in _FEATURES if f in features]
