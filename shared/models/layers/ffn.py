"""Dense feed-forward."""

from __future__ import annotations

import torch

from ..parallel import WeightPlacement, WeightSlot
from ..spec import DenseSpec
from .linear import ColumnParallel, RowParallel


class DenseMLP:
    """``down(activation(gate(x)) * up(x))``, its width split over ranks."""

    def __init__(self, place: WeightPlacement, spec: DenseSpec, hidden: int) -> None:
        mine = place.tp.shard(spec.intermediate)
        shard = (spec.intermediate, mine)
        self.operators = place.operators
        self.activation = spec.activation
        self.gate_up = ColumnParallel(place, hidden, {"gate": shard, "up": shard}, spec.bias)
        self.down = RowParallel(place, "down", shard, hidden, spec.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._hidden(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand, without a bias."""
        return self.down.partial(self._hidden(x))

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.act_and_mul(self.gate_up(x), self.activation)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        return self.gate_up.weight_slots() | self.down.weight_slots()

    def finish_loading(self) -> None:
        """Pack the weights, once they are loaded."""
        self.gate_up.finish_loading()
        self.down.finish_loading()
