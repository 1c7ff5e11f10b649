"""NVIDIA's MPS, with which processes compute on a GPU at the same time, and the part of the GPU's
processors that it lets a process use."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UsageError

LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_FOLDER, _DEFAULT_FOLDER = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"


def is_running() -> bool:
    """True if the control daemon that this process's environment names runs. Its socket stays when
    it ends, its PID file does not."""
    return (Path(_folder()) / "nvidia-cuda-mps-control.pid").exists()


def _folder() -> str:
    return os.environ.get(_FOLDER) or _DEFAULT_FOLDER


def limit_of_prefill(percent: int | None, *, shares: bool) -> dict[str, str]:
    """The environment that limits a prefill node to ``percent`` of a GPU; ``None``: no limit.
    ``shares``: other nodes use the GPU too. Raises ``UsageError``."""
    if percent is None:
        return {}
    option = f"--prefill-gpu-share {percent}"
    if not shares:
        raise UsageError(
            f"{option} is for prefill nodes that share a GPU with other nodes, and none does; "
            "leave it out, or see --share-devices and --nodes-per-device"
        )
    if LIMIT in os.environ:
        raise UsageError(
            f"{LIMIT} is {os.environ[LIMIT]} in the environment, which limits all nodes; unset it, "
            f"or leave out {option}"
        )
    if not is_running():
        raise UsageError(
            f"{option} needs NVIDIA's MPS, which does not run at {_folder()}; start it "
            f"(nvidia-cuda-mps-control -d), or correct {_FOLDER}"
        )
    return {LIMIT: str(percent)}
