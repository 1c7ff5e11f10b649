"""How the bytes of a frame get from one rank to another, by name."""

from __future__ import annotations

CUDA_IPC = "cuda_ipc"
NIXL = "nixl"
SHARED_MEMORY = "shared_memory"
TCP = "tcp"
BEST_FIRST = (NIXL, CUDA_IPC, SHARED_MEMORY, TCP)
AUTO = "auto"
# NIXL opens ports of its own choice and gives peers keys to memory: somebody has to ask for it.
UNASKED = (CUDA_IPC, SHARED_MEMORY, TCP)
# Both ranks must be processes of one host.
ON_ONE_HOST = (CUDA_IPC, SHARED_MEMORY)


def allowed(setting: str) -> str:
    """What ``--carrier`` allows, in the form of a greeting: what needs no asking, or what it
    names."""
    return ",".join(UNASKED) if setting == AUTO else setting


def allows(setting: str, carrier: str) -> bool:
    """Whether ``--carrier`` lets a rank use this one."""
    return carrier in allowed(setting).split(",")
