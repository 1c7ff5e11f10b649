"""Linear layers split over tensor-parallel ranks."""

from __future__ import annotations

import torch

from ...kernels.reference.linear import Product
from .parallel import WeightPlacement, WeightSlot, whole


class ColumnParallel:
    """Several products of the same input as one: each rank computes a range of each one's outputs.

    ``parts`` maps a part's name to its number of outputs and this rank's range of them.
    """

    def __init__(
        self, place: WeightPlacement, inputs: int, parts: dict[str, tuple[int, range]], bias: bool
    ) -> None:
        outputs = sum(len(mine) for _, mine in parts.values())
        self.weight = place.empty(outputs, inputs)
        self.bias = place.empty(outputs) if bias else None
        self.inputs = inputs
        self.parts = parts
        self.operators = place.operators
        self._product: Product | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self._product is not None, "finish() comes first"
        return self._product(x)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        slots, row = {}, 0
        for name, (total, mine) in self.parts.items():
            rows = slice(row, row + len(mine))
            row += len(mine)
            weight = self.weight[rows]
            slots[f"{prefix}.{name}.weight"] = WeightSlot(
                weight, (total, self.inputs), 0, mine.start, mine.stop
            )
            if self.bias is not None:
                bias = self.bias[rows]
                slots[f"{prefix}.{name}.bias"] = WeightSlot(
                    bias, (total,), 0, mine.start, mine.stop
                )
        return slots

    def finish(self) -> None:
        """Called once the parameters are filled; the plain weight may go."""
        self._product = self.operators.product(self.weight, self.bias)
        del self.weight


class RowParallel:
    """Each rank takes a range of the inputs, and the products are summed."""

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
        self._product: Product | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.tp.all_reduce(self.partial(x))
        # Added after the sum, so that it counts once.
        return out if self.bias is None else out + self.bias

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand, for a caller that has more to add before the sum over ranks."""
        assert self._product is not None, "finish() comes first"
        return self._product(x)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        shape = (self.weight.shape[0], self.inputs)
        name = f"{prefix}.{self.name}"
        slots = {
            f"{name}.weight": WeightSlot(self.weight, shape, 1, self.mine.start, self.mine.stop)
        }
        if self.bias is not None:
            slots[f"{name}.bias"] = whole(self.bias)
        return slots

    def finish(self) -> None:
        """Called once the parameters are filled; the plain weight may go."""
        self._product = self.operators.product(self.weight, None)
        del self.weight
