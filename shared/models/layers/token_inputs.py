"""Per-layer embeddings: inputs of each layer that depend on the tokens themselves.

T rows, L layers, P numbers of an input.
"""

from __future__ import annotations

import torch

from ..parallel import WeightPlacement, WeightSlot, replicated_slot
from ..spec import DecoderSpec, TokenInputs
from .linear import ColumnParallel, RowParallel
from .norm import RMSNorm
from .part import Part
from .vocabulary import VocabParallel

# Both summands have a variance of one, and so has their sum.
_HALF_VARIANCE = 2.0**-0.5


class TokenEmbedding(Part):
    """The inputs of all layers: rows of a table, and a projection of the embeddings."""

    def __init__(self, place: WeightPlacement, spec: DecoderSpec) -> None:
        inputs = spec.token_inputs
        assert inputs is not None
        self.shape = len(spec.layers), inputs.dim
        width = len(spec.layers) * inputs.dim
        self.table = VocabParallel(
            place.at("table"), inputs.vocab_size, width, embeds=True, is_head=False
        )
        # Replicated: each layer's share is only as wide as a head.
        whole = (width, range(width))
        self.projection = ColumnParallel(place, spec.hidden_size, {"projection": whole}, bias=False)
        self.norm = RMSNorm(place.at("norm"), inputs.dim, spec.norm_eps)
        # Rounded like the embeddings.
        self.table_scale = torch.tensor(inputs.dim**0.5, dtype=place.dtype).item()
        self.projection_scale = spec.hidden_size**-0.5

    def __call__(self, tokens_T: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The inputs, [T, L, P], of tokens with the embeddings ``x``."""
        shape = (len(x), *self.shape)
        rows = (self.table.embed(tokens_T) * self.table_scale).view(shape)
        projection = (self.projection(x) * self.projection_scale).view(-1, self.shape[1])
        return (self.norm(projection).view(shape) + rows) * _HALF_VARIANCE


class TokenGate(Part):
    """What a layer's token input adds: ``norm(down(activation(gate(x)) * input))``."""

    def __init__(
        self, place: WeightPlacement, inputs: TokenInputs, hidden: int, eps: float
    ) -> None:
        self.mine = place.tp.shard(inputs.dim)
        shard = (inputs.dim, self.mine)
        self.gate = ColumnParallel(place, hidden, {"gate": shard}, bias=False)
        self.down = RowParallel(place, "down", shard, hidden, bias=False)
        self.norm = RMSNorm(place.at("norm"), hidden, eps)
        self.operators = place.operators
        self.activation = inputs.activation

    def __call__(self, x: torch.Tensor, input_TP: torch.Tensor) -> torch.Tensor:
        mine = input_TP[:, self.mine.start : self.mine.stop]
        gate = self.operators.activate(self.gate(x), self.activation) * mine
        return self.norm(self.down(gate))


class OutputScale(Part):
    """One number by which a layer's output is multiplied."""

    def __init__(self, place: WeightPlacement) -> None:
        self.weight = place.empty_norm(1)
        self.name = place.name("weight")

    def own_slots(self) -> dict[str, WeightSlot]:
        return {self.name: replicated_slot(self.weight)}
