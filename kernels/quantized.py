"""Quantised weights: bytes of blocks, and their codes, scales and minimums taken apart.

O outputs, I inputs, S groups of neighbouring inputs that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .block_codes import take_apart
from .block_formats import PACKED_FORMATS, BlockFormat
from .grouped_codes import GroupedCodes


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight as its file has it: uint8 [O, bytes of a row]."""

    format: BlockFormat
    blocks: torch.Tensor

    @property
    def inputs(self) -> int:
        return self.blocks.shape[1] // self.format.nbytes * self.format.values

    @property
    def outputs(self) -> int:
        return len(self.blocks)

    def part(self, outputs: slice | torch.Tensor) -> QuantizedWeight:
        """Some of the outputs."""
        return QuantizedWeight(self.format, self.blocks[outputs])

    def values(self) -> torch.Tensor:
        """The weight in fp32, [O, I]."""
        return self.taken_apart().values()

    def taken_apart(self) -> GroupedCodes:
        """The codes as they are in the blocks."""
        return take_apart(self.format, self.blocks.unflatten(1, (-1, self.format.nbytes)))


def grouped_codes(weight: QuantizedWeight) -> GroupedCodes:
    """Take the blocks apart, for keeping: codes of up to 4 bits become halves of bytes."""
    codes = weight.taken_apart()
    return codes.packed() if weight.format in PACKED_FORMATS else codes


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """``QuantizedWeight.values``."""
    return weight.values()
