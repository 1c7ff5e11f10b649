"""Dense feed-forward."""

from __future__ import annotations

import torch

from ..parallel import WeightPlacement
from ..spec import DenseSpec
from .linear import ColumnParallel, RowParallel
from .part import Part


class DenseMLP(Part):
    """``down(activation(gate(x)) * up(x))``, or without the gate; split over ranks by its width."""

    def __init__(self, place: WeightPlacement, spec: DenseSpec, hidden: int) -> None:
        format = place.format_of(place.name("down.weight"))
        mine = place.tp.shard_of_inputs(spec.intermediate, format)
        shard = (spec.intermediate, mine)
        shards = {"gate": shard, "up": shard} if spec.gated else {"up": shard}
        self.place = place
        self.operators = place.operators
        self.width = len(mine)
        self.spec = spec
        self.up = ColumnParallel(place, hidden, shards, spec.bias)
        self.down = RowParallel(place, "down", shard, hidden, spec.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._hidden(x))

    def pack(self) -> None:
        if self.spec.gated:
            self.operators.prepare_act_and_mul(
                self.spec.activation, self.width, self.place.activations, self.place.device
            )

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand, without a bias."""
        return self.down.partial(self._hidden(x))

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        operators, spec = self.operators, self.spec
        act = operators.act_and_mul if spec.gated else operators.activate
        return act(self.up(x), spec.activation)
