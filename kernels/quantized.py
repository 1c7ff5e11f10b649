"""Quantised weights: bytes of blocks, and their codes, scales and minimums taken apart.

O outputs, I inputs, S groups of neighbouring inputs that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .block_formats import Q4_0, Q4_1, Q6_K, Q8_0, BlockFormat


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight as its file has it: uint8 [O, bytes of a row]."""

    format: BlockFormat
    blocks: torch.Tensor

    @property
    def inputs(self) -> int:
        return self.blocks.shape[1] // self.format.nbytes * self.format.values


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """``scale * (code - zero) + minimum``, exactly as the blocks have it.

    ``codes`` are int8 [O, I], or uint8 [O, S, group / 2] with two codes in a byte: the low halves
    are the group's first inputs, the high ones the others. ``scales`` and ``minimums``, fp16 or
    fp32, are [O, S].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    group: int
    zero: int = 0

    @property
    def halves(self) -> bool:
        """True if a byte has two codes."""
        return self.codes.dtype == torch.uint8

    def part(self, outputs: slice) -> GroupedCodes:
        """Some of the outputs."""
        minimums = None if self.minimums is None else self.minimums[outputs]
        return replace(
            self, codes=self.codes[outputs], scales=self.scales[outputs], minimums=minimums
        )

    def values(self) -> torch.Tensor:
        """The weight in fp32, [O, I]."""
        scales = self.scales.float()[:, :, None]
        if self.halves:
            codes = torch.cat([self.codes & 15, self.codes >> 4], dim=-1)
        else:
            codes = self.codes.view(len(self.codes), -1, self.group)
        wide = codes.float()
        if self.zero:
            wide -= self.zero
        wide *= scales
        if self.minimums is not None:
            wide += self.minimums.float()[:, :, None]
        return wide.flatten(1)


def grouped_codes(weight: QuantizedWeight) -> GroupedCodes:
    """Take the blocks apart."""
    blocks = weight.blocks.view(len(weight.blocks), -1, weight.format.nbytes)
    if weight.format == Q6_K:
        return _grouped_q6_k(blocks)
    scales = _halves(blocks[..., :2])
    if weight.format == Q8_0:
        codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
        return GroupedCodes(codes, scales, None, 32)
    if weight.format == Q4_0:
        return GroupedCodes(blocks[..., 2:].contiguous(), scales, None, 32, zero=8)
    assert weight.format == Q4_1, weight.format
    return GroupedCodes(blocks[..., 4:].contiguous(), scales, _halves(blocks[..., 2:4]), 32)


def _grouped_q6_k(blocks: torch.Tensor) -> GroupedCodes:
    low, high, scales, scale = blocks.split([128, 64, 16, 2], dim=-1)
    # Each half of a block has 128 codes: bytes l and 32 + l of low, and byte l of high, are those
    # of inputs l, 32 + l, 64 + l and 96 + l.
    low = low.unflatten(-1, (2, 2, 32))
    low = torch.cat([low & 15, low >> 4], dim=-2)
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8, device=blocks.device)
    high = high.unflatten(-1, (2, 1, 32)) >> shifts & 3
    codes = (low | high << 4).view(torch.int8) - 32
    each = scales.contiguous().view(torch.int8).float() * _halves(scale)[..., None].float()
    return GroupedCodes(codes.flatten(1), each.flatten(1), None, 16)


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """The fp16 number in the two bytes of the last dimension."""
    return pairs.contiguous().view(torch.float16).squeeze(-1)


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """The weight in fp32, [O, I]."""
    return grouped_codes(weight).values()
