"""Norms: of hidden states, and of queries and keys."""

from __future__ import annotations

import torch

from ..parallel import WeightPlacement, WeightSlot, replicated_slot
from ..spec import NormKind
from .part import Part


class RMSNorm(Part):
    """Root-mean-square norm over the last dimension."""

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

    def own_slots(self) -> dict[str, WeightSlot]:
        return {self.name: replicated_slot(self.weight)}

    def pack(self) -> None:
        weight = self.weight
        self.operators.prepare_norm(len(weight), weight.dtype, weight.device)


class LayerNorm(Part):
    """Norm over the last dimension that subtracts the mean."""

    def __init__(self, place: WeightPlacement, size: int, eps: float, *, bias: bool) -> None:
        self.weight = place.empty_norm(size)
        self.bias = place.empty_norm(size) if bias else None
        self.names = place.name("weight"), place.name("bias")
        self.operators = place.operators
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised sum, and the sum."""
        total = x + residual
        return self(total), total

    def own_slots(self) -> dict[str, WeightSlot]:
        weight, bias = self.names
        slots = {weight: replicated_slot(self.weight)}
        return slots if self.bias is None else slots | {bias: replicated_slot(self.bias)}


Norm = RMSNorm | LayerNorm
# The total number of heads, and the range of them on this rank.
Heads = tuple[int, range]


def make_norm(place: WeightPlacement, kind: NormKind, size: int, eps: float) -> Norm:
    """A norm of hidden states."""
    if kind is NormKind.RMS:
        return RMSNorm(place, size, eps)
    return LayerNorm(place, size, eps, bias=kind is NormKind.LAYER)


class HeadNorm(Part):
    """Weights of an RMS norm over each query and key head: one for queries, one for keys. Operators
    apply it together with the rotation."""

    def __init__(self, place: WeightPlacement, heads: int, kv_heads: int, dim: int) -> None:
        self.q = place.empty_norm(dim)
        self.k = place.empty_norm(dim) if kv_heads else None
        self.names = place.name("q_norm.weight"), place.name("k_norm.weight")
        self.heads = heads
        self.kv_heads = kv_heads
        self._weight: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """[query and key heads, head dimension]."""
        assert self._weight is not None, "finish_loading() comes first"
        return self._weight

    def own_slots(self) -> dict[str, WeightSlot]:
        q, k = self.names
        slots = {q: replicated_slot(self.q)}
        return slots if self.k is None else slots | {k: replicated_slot(self.k)}

    def pack(self) -> None:
        """Repeat the weights for each head."""
        keys = [] if self.k is None else [self.k] * self.kv_heads
        self._weight = torch.stack([self.q] * self.heads + keys)


class ProjectionNorm(Part):
    """RMS norm over all query heads at once, and over all key heads, before the rotation. It sums
    over all ranks."""

    def __init__(self, place: WeightPlacement, heads: Heads, kv_heads: Heads, dim: int) -> None:
        self.tp = place.tp
        self.parts = [
            _HeadsWeight(place, name, total, mine, dim)
            for name, (total, mine) in (("q_norm", heads), ("k_norm", kv_heads))
        ]

    def __call__(self, qkv_TXD: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise queries and keys, and leave values unchanged."""
        counts = [len(part.weight) for part in self.parts]
        values = qkv_TXD.shape[1] - sum(counts)
        *projections, v = qkv_TXD.split([*counts, values], dim=1)
        wide = [x.float() for x in projections]
        pairs = list(zip(wide, self.parts, strict=True))
        sums = torch.stack([x.square().sum((1, 2)) / p.copies for x, p in pairs])
        self.tp.all_reduce(sums)
        outputs = [
            x * torch.rsqrt(total / part.width + eps)[:, None, None] * part.weight
            for (x, part), total in zip(pairs, sums, strict=True)
        ]
        return torch.cat([*(x.to(v.dtype) for x in outputs), v], dim=1)


class HeadLayerNorm(Part):
    """LayerNorm over each query and key head, with a weight for each, before the rotation."""

    def __init__(self, place: WeightPlacement, heads: Heads, kv_heads: Heads, dim: int) -> None:
        self.weight = place.empty_norm((len(heads[1]) + len(kv_heads[1])) * dim).view(-1, dim)
        self.slots: dict[str, WeightSlot] = {}
        row = 0
        for norm, (total, mine) in (("q_norm", heads), ("k_norm", kv_heads)):
            for head in range(total):
                # Every rank has a slot for every head, so that each tensor of the checkpoint is
                # used.
                here = head in mine
                weight = self.weight[row] if here else self.weight[0][:0]
                name = place.name(f"{norm}.{head}.weight")
                self.slots[name] = WeightSlot(weight, (dim,), 0, 0, dim if here else 0)
                row += here

    def __call__(self, qkv_TXD: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise queries and keys, and leave values unchanged."""
        count = len(self.weight)
        qk, v = qkv_TXD.split([count, qkv_TXD.shape[1] - count], dim=1)
        out = torch.nn.functional.layer_norm(qk.float(), qk.shape[-1:], eps=eps) * self.weight
        return torch.cat([out.to(v.dtype), v], dim=1)

    def own_slots(self) -> dict[str, WeightSlot]:
        return self.slots


class _HeadsWeight(Part):
    """This rank's heads of a weight [heads, dimension]."""

    def __init__(
        self, place: WeightPlacement, name: str, total: int, mine: range, dim: int
    ) -> None:
        self.weight = place.empty_norm(len(mine) * dim).view(len(mine), dim)
        self.name = place.name(f"{name}.weight")
        self.slot = WeightSlot(
            self.weight.view(-1), (total * dim,), 0, mine.start * dim, mine.stop * dim
        )
        self.width = total * dim
        # The number of ranks that have each head.
        self.copies = max(1, place.tp.size // total)

    def own_slots(self) -> dict[str, WeightSlot]:
        return {self.name: self.slot}
