"""The residual stream between the parts of layers."""

from __future__ import annotations

import torch

from .norm import Norm


class Residual:
    """The sum of the embeddings and what the parts of layers have added. The last summand stays
    pending until the sum is needed, because a norm of the sum adds it at no cost."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        self._pending: torch.Tensor | None = None

    def add(self, out: torch.Tensor) -> None:
        """Add what a part has computed."""
        self._x, self._pending = self.sum(), out

    def replace(self, x: torch.Tensor) -> None:
        """Continue with another sum."""
        self._x, self._pending = x, None

    def sum(self) -> torch.Tensor:
        """The sum so far."""
        if self._pending is not None:
            self._x, self._pending = self._x + self._pending, None
        return self._x

    def normed(self, norm: Norm) -> torch.Tensor:
        """The norm of the sum."""
        if self._pending is None:
            return norm(self._x)
        normed, self._x = norm.add(self._pending, self._x)
        self._pending = None
        return normed
