"""Root-mean-square norms."""

from __future__ import annotations

import torch

from ...kernels import reference
from .parallel import Placement, Slot, whole


class RMSNorm:
    """Over the last dimension."""

    def __init__(self, place: Placement, size: int, eps: float) -> None:
        self.weight = place.gain(size)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return reference.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed sum, and the sum."""
        return reference.add_rms_norm(x, residual, self.weight, self.eps)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """The parameters by name, for the loader."""
        return {f"{prefix}.weight": whole(self.weight)}


class HeadNorm:
    """Over each query and key head, in one pass: queries have one gain, keys another."""

    def __init__(self, place: Placement, heads: int, kv_heads: int, dim: int, eps: float) -> None:
        self.q = place.gain(dim)
        self.k = place.gain(dim)
        self.heads = heads
        self.kv_heads = kv_heads
        self.eps = eps
        self._gains: torch.Tensor | None = None

    def __call__(self, x_THD: torch.Tensor) -> torch.Tensor:
        assert self._gains is not None, "finish() comes first"
        return reference.head_rms_norm(x_THD, self._gains, self.eps)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """The parameters by name, for the loader."""
        return {f"{prefix}.q_norm.weight": whole(self.q), f"{prefix}.k_norm.weight": whole(self.k)}

    def finish(self) -> None:
        """Called once the parameters are filled."""
        self._gains = torch.stack([self.q] * self.heads + [self.k] * self.kv_heads)
