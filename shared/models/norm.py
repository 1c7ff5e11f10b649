"""Root-mean-square norms."""

from __future__ import annotations

import torch

from .parallel import WeightPlacement, WeightSlot, whole


class RMSNorm:
    """Over the last dimension."""

    def __init__(self, place: WeightPlacement, size: int, eps: float) -> None:
        self.weight = place.gain(size)
        self.operators = place.operators
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed sum, and the sum."""
        return self.operators.add_rms_norm(x, residual, self.weight, self.eps)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        return {f"{prefix}.weight": whole(self.weight)}


class HeadNorm:
    """The gains of a norm over each query and key head: queries have one, keys another."""

    def __init__(self, place: WeightPlacement, heads: int, kv_heads: int, dim: int) -> None:
        self.q = place.gain(dim)
        self.k = place.gain(dim)
        self.heads = heads
        self.kv_heads = kv_heads
        self._gains: torch.Tensor | None = None

    @property
    def gains(self) -> torch.Tensor:
        """[query and key heads, head dimension]."""
        assert self._gains is not None, "finish() comes first"
        return self._gains

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        return {f"{prefix}.q_norm.weight": whole(self.q), f"{prefix}.k_norm.weight": whole(self.k)}

    def finish(self) -> None:
        """Called once the parameters are filled."""
        self._gains = torch.stack([self.q] * self.heads + [self.k] * self.kv_heads)
