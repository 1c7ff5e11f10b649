"""Codes that share scales in groups of neighbouring inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from .fp8 import castable


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """``scale * (code - zero) + minimum``, exactly as in the blocks.

    ``codes`` are int8 [O, I], or uint8 [O, S, group / 2] with two codes in a byte: the low halves
    are the group's first inputs, the high halves the others. With ``levels``, a 4-bit code is the
    index of a number; e4m3 codes are numbers. ``scales`` and ``minimums``, fp16, bf16 or fp32, are
    [O, S].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    group: int
    zero: int = 0
    levels: tuple[float, ...] | None = None
    # Exact zeros; ``minimums`` are their products with the scales, which may be rounded.
    zeros: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        return len(self.codes)

    @property
    def inputs(self) -> int:
        return self.scales.shape[1] * self.group

    @property
    def halves(self) -> bool:
        """True if a byte has two codes."""
        return self.codes.dtype == torch.uint8

    def part(self, outputs: slice | torch.Tensor) -> GroupedCodes:
        """Some of the outputs."""
        minimums = None if self.minimums is None else self.minimums[outputs]
        zeros = None if self.zeros is None else self.zeros[outputs]
        codes, scales = self.codes[outputs], self.scales[outputs]
        return replace(self, codes=codes, scales=scales, minimums=minimums, zeros=zeros)

    def packed(self) -> GroupedCodes:
        """Pack two codes, each from 0 to 15, in a byte."""
        if self.halves:
            return self
        groups = self.codes.view(torch.uint8).unflatten(1, (-1, 2, self.group // 2))
        return replace(self, codes=groups[:, :, 0] | groups[:, :, 1] << 4)

    def values(self) -> torch.Tensor:
        """The weight in fp32, [O, I]."""
        scales = self.scales.float()[:, :, None]
        if self.halves:
            codes = torch.cat([self.codes & 15, self.codes >> 4], dim=-1)
        else:
            codes = self.codes.unflatten(1, (-1, self.group))
        if self.levels is None:
            wide = castable(codes, torch.float32).float()
        else:
            wide = self._numbers(codes)
        if self.zeros is not None:
            wide -= self.zeros[:, :, None]
        elif self.zero:
            wide -= self.zero
        wide *= scales
        if self.minimums is not None and self.zeros is None:
            wide += self.minimums.float()[:, :, None]
        return wide.flatten(1)

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        table = self.table()
        assert table is not None
        return table.index_select(0, codes.flatten().int()).view(codes.shape)

    def table(self) -> torch.Tensor | None:
        """``levels`` in fp32, beside the codes."""
        return None if self.levels is None else _table(self.levels, self.codes.device)


@cache
def _table(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=device)
