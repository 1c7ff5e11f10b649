"""Experts of a mixture, computed one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..activations import Activation
from ..signatures import Linear

ActAndMul = Callable[[torch.Tensor, Activation], torch.Tensor]


class LoopedExperts:
    """Each expert with any rows computes all of them at once.

    The numbers of rows are copied to the host once a layer, while the device is idle.
    """

    waits = True

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
        expert_ids: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``signatures.Experts``."""
        sums = torch.zeros_like(x) if out is None else out
        for index, rows, row_weights in self._assignments(weights, expert_ids):
            gate_up, down = self._experts[index]
            hidden = self._act_and_mul(gate_up(x.index_select(0, rows)), self._activation)
            sums.index_add_(0, rows, (down(hidden) * row_weights[:, None]).to(sums.dtype))
        return sums

    def _assignments(
        self, weights: torch.Tensor, expert_ids: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Each expert with any rows, its rows and their weights."""
        counts = expert_ids.view(-1).bincount(minlength=len(self._experts)).tolist()
        order = expert_ids.view(-1).argsort(stable=True)
        rows, weights = order // expert_ids.shape[1], weights.view(-1)[order]
        first = 0
        for index, count in enumerate(counts):
            if count:
                part = slice(first, first + count)
                yield index, rows[part], weights[part]
                first += count
