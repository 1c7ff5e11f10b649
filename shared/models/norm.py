"""Root-mean-square norm."""

from __future__ import annotations

import torch

from ...kernels import reference
from .parallel import Placement, Slot, whole


class RMSNorm:
    """Over the last dimension."""

    def __init__(self, place: Placement, size: int, eps: float) -> None:
        self.weight = place.empty(size)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return reference.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed sum, and the sum."""
        return reference.add_rms_norm(x, residual, self.weight, self.eps)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """The parameters by name, for the loader."""
        return {f"{prefix}.weight": whole(self.weight)}
