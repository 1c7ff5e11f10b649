"""Experts: each token is computed by a few of many feed-forwards, and by a shared one.

T rows, E experts, K of them for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...kernels.reference.linear import Product
from .ffn import DenseMLP
from .parallel import WeightPlacement, WeightSlot, whole
from .spec import MoESpec, RouterSpec

# Sigmoids of very negative logits are all zero in float32, and must not be divided by their sum.
_NO_SCORE = 1e-20


class MoE:
    """Every rank routes all rows, alike, and has a part of every expert's width."""

    def __init__(self, place: WeightPlacement, spec: MoESpec, hidden: int) -> None:
        self.tp = place.tp
        self.router = ExpertRouter(place, spec.router, hidden)
        self.shared = DenseMLP(place, spec.shared, hidden)
        self.experts = [DenseMLP(place, spec.expert, hidden) for _ in range(spec.router.experts)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.shared.partial(x)
        for expert, rows, weights in self._assignments(x):
            computed = expert.partial(x.index_select(0, rows)) * weights[:, None]
            out.index_add_(0, rows, computed.to(out.dtype))
        return self.tp.all_reduce(out)

    def _assignments(
        self, x: torch.Tensor
    ) -> Iterator[tuple[DenseMLP, torch.Tensor, torch.Tensor]]:
        """Each expert that has any rows, with those and their weights."""
        weights, chosen = self.router(x)
        counts = chosen.view(-1).bincount(minlength=len(self.experts)).tolist()
        order = chosen.view(-1).argsort(stable=True)
        rows, weights = order // chosen.shape[1], weights.view(-1)[order]
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                part = slice(first, first + count)
                yield expert, rows[part], weights[part]
                first += count

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        slots = self.router.slots(f"{prefix}.router") | self.shared.slots(f"{prefix}.shared")
        for number, expert in enumerate(self.experts):
            slots |= expert.slots(f"{prefix}.experts.{number}")
        return slots

    def finish(self) -> None:
        """Called once the parameters are filled."""
        self.router.finish()
        self.shared.finish()
        for expert in self.experts:
            expert.finish()


class ExpertRouter:
    """Picks experts, in float32 whatever the weights are in: a tie that is broken by rounding sends
    a token elsewhere."""

    def __init__(self, place: WeightPlacement, spec: RouterSpec, hidden: int) -> None:
        self.spec = spec
        self.operators = place.operators
        precise = replace(place, dtype=torch.float32)
        self.weight = precise.empty(spec.experts, hidden)
        self.correction = precise.empty(spec.experts) if spec.correction else None
        self._product: Product | None = None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers of the experts of each row, both [T, K]."""
        assert self._product is not None, "finish() comes first"
        logits = self._product(x.float())
        scores = logits.softmax(-1) if self.spec.scoring == "softmax" else logits.sigmoid()
        wanted = scores if self.correction is None else scores + self.correction
        chosen = self._in_open_groups(wanted).topk(self.spec.chosen, sorted=False).indices
        weights = scores.gather(1, chosen)
        if self.spec.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _NO_SCORE)
        return weights * self.spec.scale, chosen

    def _in_open_groups(self, wanted: torch.Tensor) -> torch.Tensor:
        """The same, with nothing in the other groups that could be chosen."""
        spec = self.spec
        if spec.open_groups == spec.groups:
            return wanted
        grouped = wanted.unflatten(-1, (spec.groups, -1))
        quality = grouped.topk(spec.group_best).values.sum(-1)
        opened = quality.topk(spec.open_groups, sorted=False).indices
        closed = torch.ones_like(quality, dtype=torch.bool).scatter_(1, opened, False)
        return grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        slots = {f"{prefix}.weight": whole(self.weight)}
        if self.correction is not None:
            slots[f"{prefix}.bias"] = whole(self.correction)
        return slots

    def finish(self) -> None:
        """Called once the parameters are filled."""
        self._product = self.operators.product(self.weight, None)
        del self.weight
