"""The memory of a model's weights, from their headers alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from ...kernels.block_formats import BlockFormat
from ..models.decoder import Decoder
from ..models.layers.part import Part
from ..models.parallel import TensorParallel, WeightPlacement
from ..models.registry import family_of
from ..models.spec import DecoderSpec
from .checkpoint import CheckpointWeights
from .in_situ import InSitu
from .load import DTYPES
from .source import WeightSource


@dataclass(frozen=True, slots=True)
class ParameterSize:
    """A parameter of a model: the number of its values, and its bytes on one rank. ``format`` names
    the dtype or the block format, which is ``blocks``."""

    name: str
    values: int
    nbytes: int
    format: str
    blocks: BlockFormat | None = None


def parameter_sizes(
    source: WeightSource, spec: DecoderSpec, dtype: str, ranks: int = 1, isq: str | None = None
) -> list[ParameterSize]:
    """The parameters of a model on the first of ``ranks``. Reads no tensor: the decoder is built on
    the meta device. Raises ``ModelError`` for weights that do not fit the model."""
    sizes: list[ParameterSize] = []

    def measure(part: Part) -> None:
        for name, slot in part.weight_slots().items():
            target = slot.target
            format = slot.format.name if slot.format else str(target.dtype).removeprefix("torch.")
            nbytes = target.numel() * target.element_size()
            sizes.append(ParameterSize(name, prod(slot.shape), nbytes, format, slot.format))

    config = source.config()
    place = WeightPlacement(DTYPES[dtype], torch.device("meta"), TensorParallel(size=ranks))
    with source:
        in_situ = None if isq is None else InSitu(isq, spec)
        weights = CheckpointWeights(source, family_of(config.values, config.file), spec, in_situ)
        place = replace(place, format_of=weights.format_of, order_of=weights.order_of)
        Decoder(spec, place, measure, has_head=weights.has_head)
    return sizes
