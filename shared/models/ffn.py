"""The gated feed-forward."""

from __future__ import annotations

import torch

from .linear import ColumnParallel, RowParallel
from .parallel import WeightPlacement, WeightSlot
from .spec import DenseSpec


class DenseMLP:
    """``down(silu(gate(x)) * up(x))``, the width split over ranks."""

    def __init__(self, place: WeightPlacement, spec: DenseSpec, hidden: int) -> None:
        assert spec.activation == "silu", "families refuse others"
        mine = place.tp.share(spec.intermediate)
        part = (spec.intermediate, mine)
        self.operators = place.operators
        self.gate_up = ColumnParallel(place, hidden, {"gate": part, "up": part}, spec.bias)
        self.down = RowParallel(place, "down", spec.intermediate, mine, hidden, spec.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.operators.silu_and_mul(self.gate_up(x)))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand; there must be no bias."""
        return self.down.partial(self.operators.silu_and_mul(self.gate_up(x)))

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        return self.gate_up.slots(prefix) | self.down.slots(prefix)

    def finish(self) -> None:
        """Called once the parameters are filled."""
        self.gate_up.finish()
        self.down.finish()
