"""Linear layers split over tensor-parallel ranks."""

from __future__ import annotations

import torch

from ..parallel import WeightPlacement, WeightSlot, replicated_slot
from .linear_method import LinearPart, Shard, choose_method
from .part import Part


class ColumnParallel(Part):
    """Several linears of the same input merged into one: each rank computes a range of the outputs
    of each. ``shards`` maps the name of each linear to its outputs."""

    def __init__(
        self, place: WeightPlacement, inputs: int, shards: dict[str, Shard], bias: bool
    ) -> None:
        parts = [
            LinearPart(place.name(f"{name}.weight"), outputs=shard, inputs=(inputs, range(inputs)))
            for name, shard in shards.items()
        ]
        self.bias = place.empty(sum(len(part.rows) for part in parts)) if bias else None
        self.names = [place.name(f"{name}.bias") for name in shards]
        self.shards = list(shards.values())
        self.method = choose_method(place, parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.method(x)

    def own_slots(self) -> dict[str, WeightSlot]:
        slots = self.method.weight_slots()
        if self.bias is not None:
            row = 0
            for name, (total, mine) in zip(self.names, self.shards, strict=True):
                rows = self.bias[row : row + len(mine)]
                slots[name] = WeightSlot(rows, (total,), 0, mine.start, mine.stop)
                row += len(mine)
        return slots

    def pack(self) -> None:
        self.method.finish_loading(self.bias)


class RowParallel(Part):
    """Each rank takes a range of the inputs, and the results are summed."""

    def __init__(
        self, place: WeightPlacement, name: str, inputs: Shard, outputs: int, bias: bool
    ) -> None:
        part = LinearPart(place.name(f"{name}.weight"), (outputs, range(outputs)), inputs)
        self.method = choose_method(place, [part])
        self.bias = place.empty(outputs) if bias else None
        self.bias_name = place.name(f"{name}.bias")
        self.tp = place.tp

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.tp.all_reduce(self.partial(x))
        # Added after the sum, so that it is added once.
        return out if self.bias is None else out + self.bias

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand, for a caller that adds more before the sum over ranks."""
        return self.method(x)

    def own_slots(self) -> dict[str, WeightSlot]:
        slots = self.method.weight_slots()
        return slots if self.bias is None else slots | {self.bias_name: replicated_slot(self.bias)}

    def pack(self) -> None:
        self.method.finish_loading(None)
