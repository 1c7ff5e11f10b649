"""The device of a rank, as its settings name it: opened, with a core for each of its threads."""

from __future__ import annotations

import torch

from ...handoff.carriers.carrier_option import allows, not_possible
from ...handoff.carriers.cuda_ipc import NAME as CUDA_IPC
from ...handoff.carriers.cuda_ipc import NO_GPU
from ...handoff.carriers.device import DEVICE_BYTES
from ...kv.planning import CPU, CUDA
from ..device import device_named
from ..messages import RankSettings


def open_device(settings: RankSettings) -> torch.device:
    """Open the device that the settings name. Raises ``StartupError``."""
    device = device_named(settings.device, settings.device_index)
    if device.type == CPU and settings.carrier == CUDA_IPC:
        raise not_possible(CUDA_IPC, NO_GPU)
    return device


def bind_threads(settings: RankSettings, device: torch.device) -> None:
    """Give each thread of the compiled kernels a core, if the node's ranks have a thread for each.

    Threads that exist already, of the data plane for one, still run anywhere.
    """
    if device.type != CPU or settings.cpu_kernels == "torch" or settings.threads == 1:
        return
    from ....kernels.cpu.thread_cores import bind, usable_cores

    cores = usable_cores()
    if settings.threads * settings.size == len(cores):
        first = settings.rank * settings.threads
        bind(cores[first : first + settings.threads])


def data_plane_bytes(carrier: str, device: torch.device) -> int:
    """Bytes of a GPU that ``free_memory`` counts and the cache must leave to the data plane."""
    return DEVICE_BYTES if device.type == CUDA and allows(carrier, CUDA_IPC) else 0
