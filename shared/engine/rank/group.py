"""The process group of a node's ranks."""

from __future__ import annotations

import datetime
import os
import socket

import torch

from ...errors import StartupError
from ...kv.planning import CUDA
from ...models.parallel import TensorParallel
from ..messages import RankSettings

RENDEZVOUS_SECONDS = 60
_LOOPBACKS = {"lo", "lo0"}  # Linux and macOS


def meet(settings: RankSettings, device: torch.device) -> TensorParallel:
    """Wait for the other ranks, if there are any. Raises ``StartupError``."""
    if settings.size == 1:
        return TensorParallel()
    _stay_on_this_host()
    try:
        torch.distributed.init_process_group(
            "nccl" if device.type == CUDA else "gloo",
            init_method=settings.rendezvous,
            rank=settings.rank,
            world_size=settings.size,
            timeout=datetime.timedelta(seconds=RENDEZVOUS_SECONDS),
            # Makes NCCL connect at once: missing libraries are noticed now, and its memory is
            # allocated before the cache is planned.
            device_id=device if device.type == CUDA else None,
        )
        control = torch.distributed.new_group(backend="gloo")
    except (RuntimeError, ValueError) as error:
        raise StartupError(
            f"rank {settings.rank} did not meet the other {settings.size - 1} at "
            f"{settings.rendezvous} within {RENDEZVOUS_SECONDS} s: {str(error).splitlines()[0]}"
        ) from None
    return TensorParallel(settings.rank, settings.size, control=control)


def _stay_on_this_host() -> None:
    """Let the node's ranks, which share a host, listen for each other on loopback only.

    By default gloo takes the address of the host's name, and NCCL any interface. Variables that are
    already set stay.
    """
    names = {name for _, name in socket.if_nameindex()}
    for name in _LOOPBACKS & names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
