"""``x @ w.T`` of activations that are rounded to int8 with weights in panels of codes.

    x [*, in] fp32   w in panels (``block_layouts.py``)   ->   out [rows, outputs] fp32

A product is computed for groups of rows, each with a weight of its own: one group for a linear, one
for each chosen expert of a mixture. Rows are divided into tiles, whose sums stay in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numba import prange

from ..block_formats import BlockFormat
from ..quantized import QuantizedWeight
from .block_layouts import BLOCK, LANES, LAYOUTS, Layout, Panels
from .byte_tile import multiply_tile, quantise_block
from .jit import array, kernel

# Rows of the tiles that are compiled. Rows that fill the last tile of a group are computed, and not
# written.
_MOST = 16
# Dividing so few rows among threads takes longer than to round them.
_FEW = 4
# A thread takes panels of so many bytes at once, for all tiles: they stay in the L2 cache.
_SHARE = 1 << 19
# Where a group's rows are: its weight, its first tile and the one after its last.
GROUP_FIELDS = 3
# Where a tile's rows are: the first in ``sources`` and ``out``, their number, the number that it is
# filled to, and the rows of all tiles before it.
TILE_FIELDS = 4


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which rows of x are multiplied by which weight: int64 arrays.

    ``sources`` are the rows of x in the order of ``out``.
    """

    sources: np.ndarray
    tiles: np.ndarray
    groups: np.ndarray


@lru_cache(32)
def plan_of_all(rows: int) -> RowPlan:
    """All rows, multiplied by one weight."""
    firsts = np.arange(0, rows, _MOST)
    counts = np.minimum(_MOST, rows - firsts)
    filled = np.array([filled_rows(count) for count in counts], np.int64)
    tiles = np.stack([firsts, counts, filled, firsts], axis=1)
    groups = np.array([[0, 0, len(tiles)]], np.int64)
    return RowPlan(np.arange(rows), np.ascontiguousarray(tiles), groups)


class PanelWeights:
    """Weights of one format and shape, in panels."""

    def __init__(self, format: BlockFormat, count: int, outputs: int, inputs: int) -> None:
        self.outputs = outputs
        self._layout = LAYOUTS[format.name]
        self._inputs = inputs
        panels = -(-outputs // LANES)
        self._nbytes = self._layout.sections(panels, inputs // BLOCK)[-1]
        # Torch's memory begins with a cache line, unlike numpy's.
        self._data = torch.empty(count, self._nbytes, dtype=torch.uint8)
        self._flat = array(self._data.view(-1))
        self._bias = np.zeros(panels * LANES, np.float32)
        self._share = max(1, min(panels // (4 * torch.get_num_threads()), _SHARE * panels // self._nbytes))
        self._multiply = _compiled(format.name)

    def fill(self, index: int, weight: QuantizedWeight) -> None:
        """Bring a weight into panels."""
        self._panels(index).fill(weight)

    def set_bias(self, bias: torch.Tensor) -> None:
        """Add a bias to every product."""
        self._bias[: self.outputs] = bias.float().numpy()

    def multiply(self, x: np.ndarray, plan: RowPlan, out: np.ndarray, column: int = 0) -> None:
        """Write products to some columns of ``out``."""
        self._multiply(
            self._flat, self._nbytes, self._bias, self.outputs, self._share,
            x, plan.sources, plan.tiles, plan.groups, out, column,
        )

    def rows(self, index: int, outputs: torch.Tensor) -> torch.Tensor:
        """A weight's values for some outputs, in fp32."""
        return self._panels(index).rows(outputs)

    def _panels(self, index: int) -> Panels:
        return Panels(self._layout, self._data[index], self.outputs, self._inputs)


class PanelLinear:
    """The product with one quantised weight."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        outputs = len(weight.blocks)
        self._weights = PanelWeights(weight.format, 1, outputs, weight.inputs)
        self._weights.fill(0, weight)
        if bias is not None:
            self._weights.set_bias(bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), self._weights.outputs)
        if len(x):
            self._weights.multiply(array(x.float()), plan_of_all(len(x)), array(out))
        return out.to(x.dtype)


@kernel()
def filled_rows(rows: int) -> int:
    """The size of a tile for so many rows, up to the most."""
    if rows <= 2:
        return rows
    if rows <= 4:
        return 4
    if rows <= 8:
        return 8
    return _MOST


@kernel(exact=True)
def _quantise(
    x: np.ndarray,
    tile: np.ndarray,
    row: int,
    sources: np.ndarray,
    zero: int,
    minimums: bool,
    groups: int,
    codes: np.ndarray,
    scales: np.ndarray,
    offsets: np.ndarray,
) -> None:
    """A row of a tile. The offset of a group's sum is ``-zero`` times the sum of its codes, or, for
    the minimum, the sum's fp32 value as bits: the exact sum would not match the codes."""
    blocks = x.shape[1] // BLOCK
    source, place, filled = sources[tile[0] + row], tile[3] * blocks, tile[2]
    flat = x.reshape(-1)
    for block in range(blocks):
        to = place + block * filled + row
        at = source * x.shape[1] + block * BLOCK
        scale, first, second = quantise_block(flat, at, codes, scales, to)
        if minimums:
            if groups == 1:
                offsets[to] = np.float32(scale * np.float32(first + second)).view(np.int32)
            else:
                offsets[2 * to] = np.float32(scale * np.float32(first)).view(np.int32)
                offsets[2 * to + 1] = np.float32(scale * np.float32(second)).view(np.int32)
        elif groups == 1:
            offsets[to] = -zero * (first + second)
        else:
            offsets[2 * to] = -zero * first
            offsets[2 * to + 1] = -zero * second


@cache
def _compiled(format: str) -> Callable[..., Any]:
    """The product with weights of a format."""
    layout: Layout = LAYOUTS[format]
    kind = list(LAYOUTS).index(format)
    zero, minimums, groups = layout.zero, layout.minimums, layout.groups

    @kernel(exact=True, variant=format)
    def multiply_panel(
        filled: int,
        weight: np.ndarray,
        weight_at: int,
        panels: int,
        panel: int,
        bias: np.ndarray,
        codes: np.ndarray,
        scales: np.ndarray,
        offsets: np.ndarray,
        place: int,
        blocks: int,
        out: np.ndarray,
        out_at: int,
        out_step: int,
        count: int,
        lanes: int,
    ) -> None:
        # The number of rows is a compile-time constant of a tile.
        if filled == 1:
            multiply_tile(kind, 1, weight, weight_at, panels, panel, bias, panel * LANES, codes, scales, offsets, place, blocks, out, out_at, out_step, count, lanes)
        elif filled == 2:
            multiply_tile(kind, 2, weight, weight_at, panels, panel, bias, panel * LANES, codes, scales, offsets, place, blocks, out, out_at, out_step, count, lanes)
        elif filled == 4:
            multiply_tile(kind, 4, weight, weight_at, panels, panel, bias, panel * LANES, codes, scales, offsets, place, blocks, out, out_at, out_step, count, lanes)
        elif filled == 8:
            multiply_tile(kind, 8, weight, weight_at, panels, panel, bias, panel * LANES, codes, scales, offsets, place, blocks, out, out_at, out_step, count, lanes)
        else:
            multiply_tile(kind, 16, weight, weight_at, panels, panel, bias, panel * LANES, codes, scales, offsets, place, blocks, out, out_at, out_step, count, lanes)

    @kernel(parallel=True, exact=True, variant=format)
    def multiply(
        weights: np.ndarray,
        nbytes: int,
        bias: np.ndarray,
        outputs: int,
        share: int,
        x: np.ndarray,
        sources: np.ndarray,
        tiles: np.ndarray,
        groups_: np.ndarray,
        out: np.ndarray,
        column: int,
    ) -> None:
        blocks = x.shape[1] // BLOCK
        last = tiles[len(tiles) - 1]
        places = (last[2] + last[3]) * blocks
        codes = np.empty(places * BLOCK, np.int8)
        scales = np.empty(places, np.float32)
        offsets = np.empty(places * groups, np.int32)
        if len(sources) <= _FEW:
            for t in range(len(tiles)):
                for row in range(tiles[t, 1]):
                    _quantise(x, tiles[t], row, sources, zero, minimums, groups, codes, scales, offsets)
        else:
            for t in prange(len(tiles)):
                for row in range(tiles[t, 1]):
                    _quantise(x, tiles[t], row, sources, zero, minimums, groups, codes, scales, offsets)
        panels = (outputs + LANES - 1) // LANES
        shares = (panels + share - 1) // share
        flat = out.reshape(-1)
        step = out.shape[1]
        for item in prange(shares * len(groups_)):
            group = groups_[item // shares]
            first = item % shares * share
            for t in range(group[1], group[2]):
                tile = tiles[t]
                for panel in range(first, min(panels, first + share)):
                    multiply_panel(
                        tile[2], weights, group[0] * nbytes, panels, panel, bias, codes, scales,
                        offsets, tile[3], blocks, flat, tile[0] * step + column + panel * LANES,
                        step, tile[1], min(LANES, outputs - panel * LANES),
                    )

    return multiply
