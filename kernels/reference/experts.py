"""Experts of a mixture, computed one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..activations import Activation
from ..signatures import Linear

ActAndMul = Callable[[torch.Tensor, Activation], torch.Tensor]


class LoopedExperts:
    """Each expert that has any rows computes all of them in one go.

    How many rows each has is copied to the host, once a layer: a device computes nothing meanwhile.
    """

    def __init__(
        self,
        gate_up: list[Linear],
        down: list[Linear],
        act_and_mul: ActAndMul,
        activation: Activation,
    ) -> None:
        self._experts = list(zip(gate_up, down, strict=True))
        self._act_and_mul = act_and_mul
        self._activation = activation

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See ``signatures.Experts``."""
        for index, rows, row_weights in self._assignments(weights, chosen):
            gate_up, down = self._experts[index]
            hidden = self._act_and_mul(gate_up(x.index_select(0, rows)), self._activation)
            out.index_add_(0, rows, (down(hidden) * row_weights[:, None]).to(out.dtype))

    def _assignments(
        self, weights: torch.Tensor, chosen: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Each expert that has any rows, with these and their weights."""
        counts = chosen.view(-1).bincount(minlength=len(self._experts)).tolist()
        order = chosen.view(-1).argsort(stable=True)
        rows, weights = order // chosen.shape[1], weights.view(-1)[order]
        first = 0
        for index, count in enumerate(counts):
            if count:
                part = slice(first, first + count)
                yield index, rows[part], weights[part]
                first += count
