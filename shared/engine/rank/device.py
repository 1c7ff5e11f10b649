"""A rank's device: opening it, and binding its threads to cores."""

from __future__ import annotations

import torch

from ...handoff.carriers.cuda_ipc import NAME as CUDA_IPC
from ...handoff.carriers.cuda_ipc import NO_GPU
from ...handoff.carriers.device import DEVICE_BYTES
from ...handoff.carriers.option import allows, not_possible
from ...kv.planning import CPU, CUDA
from ..device import choose_device
from ..messages import RankSettings


def open_device(settings: RankSettings) -> torch.device:
    """Open the device of the settings. Raises ``StartupError``."""
    device = choose_device(settings.device, settings.device_index)
    if device.type == CPU and settings.carrier == CUDA_IPC:
        raise not_possible(CUDA_IPC, NO_GPU)
    return device


def bind_threads(settings: RankSettings, device: torch.device) -> None:
    """Give each thread of the compiled kernels a core, if the node's ranks have a thread for each.

    Existing threads, such as the data plane's, still run anywhere.
    """
    if device.type != CPU or settings.cpu_kernels == "torch" or settings.threads == 1:
        return
    from ....kernels.cpu.thread_cores import bind, usable_cores

    cores = usable_cores()
    if settings.threads * settings.size == len(cores):
        first = settings.rank * settings.threads
        bind(cores[first : first + settings.threads])


def data_plane_bytes(carrier: str, device: torch.device) -> int:
    """Bytes of a GPU's free memory that the data plane needs."""
    return DEVICE_BYTES if device.type == CUDA and allows(carrier, CUDA_IPC) else 0
