"""Quantised weights as bytes of blocks, and their conversion to codes, scales and minimums.

O outputs, I inputs, S groups of neighbouring inputs that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .block_codes import unpack_blocks
from .block_formats import PACKED_FORMATS, BlockFormat, GroupFormat
from .grouped_codes import GroupedCodes


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight in the bytes of its file: uint8 [O, bytes of a row]. ``order`` has the input at each
    place of a row, if inputs are reordered."""

    format: BlockFormat
    blocks: torch.Tensor
    order: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        return self.blocks.shape[1] // self.format.nbytes * self.format.values

    @property
    def outputs(self) -> int:
        return len(self.blocks)

    def part(self, outputs: slice | torch.Tensor) -> QuantizedWeight:
        """Some of the outputs."""
        return QuantizedWeight(self.format, self.blocks[outputs], self.order)

    def values(self) -> torch.Tensor:
        """The weight in fp32, [O, I]."""
        placed = self.to_codes().values()
        if self.order is None:
            return placed
        return torch.empty_like(placed).index_copy_(1, self.order, placed)

    def to_codes(self) -> GroupedCodes:
        """The codes in the order of the blocks."""
        return unpack_blocks(self.format, self.blocks.unflatten(1, (-1, self.format.nbytes)))


def grouped_codes(weight: QuantizedWeight) -> GroupedCodes:
    """Unpack the blocks compactly: codes of up to 4 bits become halves of bytes."""
    codes, format = replace(weight.to_codes(), zeros=None), weight.format
    few = isinstance(format, GroupFormat) and format.bits < 4 and format.values % 2 == 0
    return codes.packed() if few or format in PACKED_FORMATS else codes


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """``QuantizedWeight.values``."""
    return weight.values()
