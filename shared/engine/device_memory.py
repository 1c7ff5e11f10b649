"""A device's description and its memory."""

from __future__ import annotations

from pathlib import Path

import torch

from ...kernels.gpu.capability import capability_of
from ..kv.planning import CPU, CUDA, RankDevice


def report(device: torch.device) -> RankDevice:
    """The device's description, for the head."""
    name = description(device)
    if device.type == CPU:
        return RankDevice(CPU, name, _total_memory(), free_memory(device))
    free, total = torch.cuda.mem_get_info(device)
    return RankDevice(device.type, name, total, free, capability_of(device))


def description(device: torch.device) -> str:
    """A CPU's instructions; the number and name of a GPU, and the generation of NVIDIA's."""
    if device.type == CPU:
        return f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    capability = ".".join(map(str, capability_of(device)))
    generation = "" if capability == "0.0" else f", compute capability {capability}"
    return f"GPU {device.index} ({torch.cuda.get_device_name(device)}{generation})"


def free_memory(device: torch.device) -> int:
    """Bytes that this process could still allocate; on a CPU, within the machine's memory and the
    container's limit."""
    if device.type == CUDA:
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo("MemAvailable") or (8 << 30)
    limit, usage = (_cgroup(name) for name in ("max", "current"))
    if limit is not None and usage is not None:
        free = min(free, max(0, limit - usage))
    return free


def _total_memory() -> int:
    total = _meminfo("MemTotal") or (8 << 30)
    return min(total, _cgroup("max") or total)


def _meminfo(field: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    return None


def _cgroup(name: str) -> int | None:
    try:
        return int(Path(f"/sys/fs/cgroup/memory.{name}").read_text())
    except (OSError, ValueError):  # no cgroup, or "max"
        return None
