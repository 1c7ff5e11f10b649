"""Root-mean-square norms."""

from __future__ import annotations

import torch

from ..parallel import WeightPlacement, WeightSlot, replicated


class RMSNorm:
    """Norm over the last dimension."""

    def __init__(self, place: WeightPlacement, size: int, eps: float) -> None:
        self.weight = place.empty_norm(size)
        self.name = place.name("weight")
        self.operators = place.operators
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised sum, and the sum."""
        return self.operators.add_rms_norm(x, residual, self.weight, self.eps)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        return {self.name: replicated(self.weight)}

    def finish_loading(self) -> None:
        """Nothing to pack."""


class HeadNorm:
    """Weights of a norm over each query and key head: one for queries, one for keys."""

    def __init__(self, place: WeightPlacement, heads: int, kv_heads: int, dim: int) -> None:
        self.q = place.empty_norm(dim)
        self.k = place.empty_norm(dim)
        self.names = place.name("q_norm.weight"), place.name("k_norm.weight")
        self.heads = heads
        self.kv_heads = kv_heads
        self._weight: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """[query and key heads, head dimension]."""
        assert self._weight is not None, "finish_loading() comes first"
        return self._weight

    def weight_slots(self) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        return dict(zip(self.names, (replicated(self.q), replicated(self.k)), strict=True))

    def finish_loading(self) -> None:
        """Repeat the weights for each head, once they are loaded."""
        self._weight = torch.stack([self.q] * self.heads + [self.k] * self.kv_heads)
