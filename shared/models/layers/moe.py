"""Mixture of experts: each token is computed by a few of many feed-forwards, and by a shared one if
there is one.

T rows, E experts, K of them for each row.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ....kernels.signatures import Experts, Linear
from ..parallel import WeightPlacement, WeightSlot, replicated
from ..spec import MoESpec, RouterSpec
from .ffn import DenseMLP

# Sigmoids of very negative logits are all zero in float32, and must not be divided by their sum.
_NO_SCORE = 1e-20


class MoE:
    """Every rank routes all rows, with equal results, and has a part of every expert's width."""

    def __init__(self, place: WeightPlacement, spec: MoESpec, hidden: int) -> None:
        self.tp = place.tp
        self.operators = place.operators
        self.activation = spec.expert.activation
        self.router = ExpertRouter(place.at("router"), spec.router, hidden)
        self.shared = (
            None if spec.shared is None else DenseMLP(place.at("shared"), spec.shared, hidden)
        )
        self.experts = [
            DenseMLP(place.at(f"experts.{index}"), spec.expert, hidden)
            for index in range(spec.router.experts)
        ]
        self._experts: Experts | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self._experts is not None, "finish_loading() comes first"
        out = torch.zeros_like(x) if self.shared is None else self.shared.partial(x)
        weights, chosen = self.router(x)
        self._experts(x, weights, chosen, out)
        return self.tp.all_reduce(out)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        slots = self.router.weight_slots()
        if self.shared is not None:
            slots |= self.shared.weight_slots()
        for expert in self.experts:
            slots |= expert.weight_slots()
        return slots

    def finish_loading(self) -> None:
        """Pack the weights, once they are loaded. No operator computes experts from codes."""
        self.router.finish_loading()
        if self.shared is not None:
            self.shared.finish_loading()
        self._experts = self.operators.prepare_experts(
            [expert.gate_up.method.take_weight() for expert in self.experts],
            [expert.down.method.take_weight() for expert in self.experts],
            self.activation,
        )


class ExpertRouter:
    """Chooses experts, in float32 whatever the weights' dtype: a tie that is broken by rounding
    sends a token elsewhere."""

    def __init__(self, place: WeightPlacement, spec: RouterSpec, hidden: int) -> None:
        self.spec = spec
        self.operators = place.operators
        precise = replace(place, dtype=torch.float32)
        self.weight = precise.empty(spec.experts, hidden)
        self.correction = precise.empty(spec.experts) if spec.correction else None
        self.names = place.name("weight"), place.name("bias")
        self._linear: Linear | None = None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and indices of the experts of each row, both [T, K]."""
        assert self._linear is not None, "finish_loading() comes first"
        logits = self._linear(x.float())
        scores = logits.softmax(-1) if self.spec.scoring == "softmax" else logits.sigmoid()
        corrected = scores if self.correction is None else scores + self.correction
        chosen = self._mask_groups(corrected).topk(self.spec.chosen, sorted=False).indices
        weights = scores.gather(1, chosen)
        if self.spec.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _NO_SCORE)
        return weights * self.spec.scale, chosen

    def _mask_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """Mask the scores outside the best groups."""
        spec = self.spec
        if spec.open_groups == spec.groups:
            return scores
        grouped = scores.unflatten(-1, (spec.groups, -1))
        quality = grouped.topk(spec.group_best).values.sum(-1)
        opened = quality.topk(spec.open_groups, sorted=False).indices
        closed = torch.ones_like(quality, dtype=torch.bool).scatter_(1, opened, False)
        return grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        weight, bias = self.names
        slots = {weight: replicated(self.weight)}
        if self.correction is not None:
            slots[bias] = replicated(self.correction)
        return slots

    def finish_loading(self) -> None:
        """Pack the weight, once it is loaded."""
        self._linear = self.operators.prepare_linear(self.weight, None)
        del self.weight
