"""The generation of a GPU."""

from __future__ import annotations

import torch


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (0, 0) of any other device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
