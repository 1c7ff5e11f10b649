"""A bias of attention scores by the distance of two tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ....kernels.attention_metadata import SequenceMetadata
from ..parallel import WeightPlacement, WeightSlot
from ..spec import PositionBias
from .part import Part


class ScoreBias(Part):
    """This rank's heads of a table with a bias for each bucket of distances."""

    def __init__(self, place: WeightPlacement, spec: PositionBias) -> None:
        mine = place.tp.shard(spec.heads)
        self.spec = spec
        self.weight = place.empty(spec.buckets, len(mine))
        self.name = place.name("weight")
        self.slot = WeightSlot(self.weight, (spec.buckets, spec.heads), 1, mine.start, mine.stop)

    def __call__(self, sequences: Iterable[SequenceMetadata]) -> list[torch.Tensor]:
        """[H, rows, tokens] for each sequence; all of its tokens must be rows of the step."""
        biases: dict[int, torch.Tensor] = {}  # by length
        result = []
        for sequence in sequences:
            length = sequence.end
            if length not in biases:
                place = torch.arange(length, device=self.weight.device)
                buckets = bucket_of(place[None] - place[:, None], self.spec)
                biases[length] = self.weight[buckets].permute(2, 0, 1).contiguous()
            result.append(biases[length])
        return result

    def own_slots(self) -> dict[str, WeightSlot]:
        return {self.name: self.slot}


def bucket_of(distance: torch.Tensor, spec: PositionBias) -> torch.Tensor:
    """The bucket of each distance, which is negative for earlier tokens."""
    each = spec.buckets // 2
    exact = each // 2
    far = distance.abs()
    # The clamp keeps the logarithm finite where it is not used.
    steps = torch.log(far.clamp(min=1) / exact) / math.log(spec.farthest / exact)
    coarse = (exact + (steps * (each - exact)).long()).clamp(max=each - 1)
    return torch.where(far < exact, far, coarse) + each * (distance > 0)
