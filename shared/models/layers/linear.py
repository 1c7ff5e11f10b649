"""Linear layers split over tensor-parallel ranks."""

from __future__ import annotations

import torch

from ....kernels.operators import Linear
from ..parallel import WeightPlacement, WeightSlot, replicated

# How many outputs (or inputs) there are in all, and the range of them on this rank.
Shard = tuple[int, range]


class ColumnParallel:
    """Several linears of the same input merged into one: each rank computes a range of each one's
    outputs.

    ``shards`` maps the name of each linear to its outputs.
    """

    def __init__(
        self, place: WeightPlacement, inputs: int, shards: dict[str, Shard], bias: bool
    ) -> None:
        outputs = sum(len(mine) for _, mine in shards.values())
        self.weight = place.empty(outputs, inputs)
        self.bias = place.empty(outputs) if bias else None
        self.inputs = inputs
        self.shards = shards
        self.operators = place.operators
        self._linear: Linear | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self._linear is not None, "finish_loading() comes first"
        return self._linear(x)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        slots, row = {}, 0
        for name, (total, mine) in self.shards.items():
            rows = slice(row, row + len(mine))
            row += len(mine)
            slots[f"{prefix}.{name}.weight"] = WeightSlot(
                self.weight[rows], (total, self.inputs), 0, mine.start, mine.stop
            )
            if self.bias is not None:
                slots[f"{prefix}.{name}.bias"] = WeightSlot(
                    self.bias[rows], (total,), 0, mine.start, mine.stop
                )
        return slots

    def take_weight(self) -> torch.Tensor:
        """Remove the loaded weight from this layer, for an owner that computes with it itself."""
        weight = self.weight
        del self.weight
        return weight

    def finish_loading(self) -> None:
        """Pack the weight, once it is loaded; the plain one is freed."""
        self._linear = self.operators.prepare_linear(self.take_weight(), self.bias)


class RowParallel:
    """Each rank takes a range of the inputs, and the results are summed."""

    def __init__(
        self, place: WeightPlacement, name: str, inputs: int, mine: range, outputs: int, bias: bool
    ) -> None:
        self.weight = place.empty(outputs, len(mine))
        self.bias = place.empty(outputs) if bias else None
        self.name = name
        self.inputs = inputs
        self.mine = mine
        self.tp = place.tp
        self.operators = place.operators
        self._linear: Linear | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.tp.all_reduce(self.partial(x))
        # Added after the sum, so that it counts once.
        return out if self.bias is None else out + self.bias

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand, for a caller that adds more before the sum over ranks."""
        assert self._linear is not None, "finish_loading() comes first"
        return self._linear(x)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        shape = (self.weight.shape[0], self.inputs)
        name = f"{prefix}.{self.name}"
        slots = {
            f"{name}.weight": WeightSlot(self.weight, shape, 1, self.mine.start, self.mine.stop)
        }
        if self.bias is not None:
            slots[f"{name}.bias"] = replicated(self.bias)
        return slots

    def take_weight(self) -> torch.Tensor:
        """Remove the loaded weight from this layer, for an owner that computes with it itself."""
        weight = self.weight
        del self.weight
        return weight

    def finish_loading(self) -> None:
        """Pack the weight, once it is loaded; the plain one is freed."""
        self._linear = self.operators.prepare_linear(self.take_weight(), None)
