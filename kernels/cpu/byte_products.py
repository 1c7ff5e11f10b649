"""``x @ w.T`` of int8-rounded activations with weights in panels of codes, and of activations in
bf16, or fp32 on CPUs that do not multiply that, with panels of floats.

    x [*, in] fp32   w in panels (``block_layouts.py``)   ->   out [rows, outputs] fp32

A product is computed for groups of rows, each with its own weight: one group for a linear, one for
each active expert of a mixture. Rows are divided into tiles, whose sums stay in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np
import torch
from numba import prange

from ..block_formats import BlockFormat
from ..quantized import QuantizedWeight
from .block_layouts import BLOCK, LANES, Layout, Panels, layout_of
from .block_packing import pack
from .byte_tile import TILES, Tile, call_address, quantise_block, tile_product
from .callees import Callee, callee_of
from .float_tile import FloatTile, round_block
from .jit import (
    array,
    compile_address,
    kernel,
    moves_bits,
    multiplies_half_lines,
    multiplies_lines,
    multiplies_pairs,
)
from .narrow_tile import NarrowTile, ShortTile
from .panel_rows import PanelRows
from .widened_tile import WidenedTile

_MAX_TILE = TILES[-1]
# Dividing this few rows among threads takes longer than rounding them.
FEW = 4
# Parts of a tile's inputs that threads round.
_PARTS = 8
# The largest number of bytes of panels that a thread multiplies at once: they stay in the L2 cache.
_SHARE = 1 << 19
# Fields of a group: its weight, its first tile and the tile after its last.
GROUP_FIELDS = 3
# Fields of a tile: its first row in ``sources`` and ``out``, the number of rows, the number with
# padding, and the padded rows of all tiles before it.
TILE_FIELDS = 4


# Kinds of activations for tiles: codes with scales and sums times minus the zero; codes with scales
# and plain sums; bf16; or fp32 in place of scales.
_ZEROS, _SUMS, _ROUNDED, _EXACT = range(4)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows of x for each weight, as int64 arrays.

    ``sources`` are the rows of x in the order of ``out``.
    """

    sources: np.ndarray
    tiles: np.ndarray
    groups: np.ndarray


@lru_cache(32)
def plan_of_all(rows: int) -> RowPlan:
    """All rows, multiplied by one weight."""
    firsts = np.arange(0, rows, _MAX_TILE)
    counts = np.minimum(_MAX_TILE, rows - firsts)
    filled = np.array([filled_rows(count) for count in counts], np.int64)
    tiles = np.stack([firsts, counts, filled, firsts], axis=1)
    groups = np.array([[0, 0, len(tiles)]], np.int64)
    return RowPlan(np.arange(rows), np.ascontiguousarray(tiles), groups)


class PanelWeights:
    """Weights of one format and shape, in panels."""

    def __init__(self, format: BlockFormat, count: int, outputs: int, inputs: int) -> None:
        self.outputs = outputs
        layout = layout_of(format)
        assert layout is not None, format
        self._layout = layout
        self._inputs = inputs
        panels = -(-outputs // LANES)
        self._nbytes = self._layout.sections(panels, inputs // BLOCK)[-1]
        # Torch's memory is aligned to cache lines, numpy's is not.
        self._data = torch.empty(count, self._nbytes, dtype=torch.uint8)
        # Without a bias, all weights have the same zeros.
        self._bias = np.zeros((1, panels * LANES), np.float32)
        threads = torch.get_num_threads()
        self._shares = threads * max(1, -(-self._nbytes // (threads * _SHARE)))
        self._address, self._function = compiled(layout, tile_of(layout))  # type: ignore[arg-type]
        self.constants = self._constant_arguments()

    def fill(self, index: int, weight: QuantizedWeight) -> None:
        """Pack a weight into panels."""
        pack(self.panels(index), weight)

    def set_bias(self, index: int, bias: torch.Tensor) -> None:
        """Add a bias to a weight's products."""
        if len(self._bias) < len(self._data):
            self._bias = np.repeat(self._bias, len(self._data), axis=0)
        self._bias[index, : self.outputs] = bias.float().numpy()
        self.constants = self._constant_arguments()

    def _constant_arguments(self) -> tuple[int, ...]:
        """The first arguments of ``multiply_groups``, stored because collecting them takes as long
        as a small product."""
        layout, bias = self._layout, self._bias
        return (
            self._address,
            _kind_of(layout),
            layout.zero,
            layout.groups,
            self._data.data_ptr(),
            self._nbytes,
            bias.ctypes.data,
            bias.strides[0] if len(bias) > 1 else 0,
            self.outputs,
            self._shares,
        )

    def multiply(self, x: np.ndarray, plan: RowPlan, out: np.ndarray, column: int = 0) -> None:
        """Write products to some columns of ``out``."""
        multiply_groups(*self.constants, x, plan.sources, plan.tiles, plan.groups, out, column)

    def panels(self, index: int) -> Panels:
        """The memory of one weight."""
        return Panels(self._layout, self._data[index], self.outputs, self._inputs)


class PanelLinear:
    """The product with one quantised weight."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        self._weights = PanelWeights(weight.format, 1, weight.outputs, weight.inputs)
        self._weights.fill(0, weight)
        if bias is not None:
            self._weights.set_bias(0, bias)
        self.outputs = weight.outputs

    @property
    def constants(self) -> tuple[int, ...]:
        """The first arguments of ``multiply_groups``, valid as long as this object exists."""
        return self._weights.constants

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), self._weights.outputs)
        if len(x):
            self._weights.multiply(array(x.float()), plan_of_all(len(x)), array(out))
        return out if x.dtype == out.dtype else out.to(x.dtype)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """See ``QuantizedLinear``."""
        return self._rows(outputs)

    @cached_property
    def _rows(self) -> PanelRows:
        return PanelRows(self._weights.panels(0))


@kernel()
def filled_rows(rows: int) -> int:
    """The size of the smallest tile with room for ``rows``."""
    for size in TILES:
        if size >= rows:
            return size
    return TILES[-1]


@kernel(exact=True)
def _quantise(
    x: np.ndarray,
    tile: np.ndarray,
    first: int,
    end: int,
    sources: np.ndarray,
    kind: int,
    zero: int,
    groups: int,
    codes: np.ndarray,
    scales: np.ndarray,
    offsets: np.ndarray,
) -> None:
    """A tile's blocks from ``first`` to ``end``, of a ``kind``. The offset of a group's sum is
    ``-zero`` times the sum of its codes, or that sum's fp32 value as bits: the exact sum would not
    match the codes."""
    inputs = x.shape[1]
    place, filled = tile[3] * (inputs // BLOCK), tile[2]
    flat = x.reshape(-1)
    for row in range(tile[1]):
        start = sources[tile[0] + row] * inputs
        for block in range(first, end):
            to, at = place + block * filled + row, start + block * BLOCK
            if kind == _ROUNDED:
                round_block(flat, at, codes, to)
                continue
            if kind == _EXACT:
                for place_ in range(BLOCK):
                    scales[to * BLOCK + place_] = flat[at + place_]
                continue
            scale, low, high = quantise_block(flat, at, codes, scales, to)
            if groups == 1:
                low += high
            for group in range(groups):
                number = high if group else low
                if kind == _SUMS:
                    total = np.float32(scale * np.float32(number))
                    offsets[groups * to + group] = total.view(np.int32)
                else:
                    offsets[groups * to + group] = -zero * number


@kernel(parallel=True, exact=True)
def multiply_groups(
    multiply_panel: int,
    kind: int,
    zero: int,
    groups: int,
    weights: int,
    nbytes: int,
    bias: int,
    bias_bytes: int,
    outputs: int,
    shares: int,
    x: np.ndarray,
    sources: np.ndarray,
    tiles: np.ndarray,
    row_groups: np.ndarray,
    out: np.ndarray,
    column: int,
) -> None:
    """The product of each group of rows with its weight. ``weights`` and ``bias`` are addresses."""
    blocks = x.shape[1] // BLOCK
    last = tiles[len(tiles) - 1]
    places = (last[2] + last[3]) * blocks
    codes = np.empty(places * BLOCK * (2 if kind == _ROUNDED else 1), np.int8)
    scales = np.empty(places * (BLOCK if kind == _EXACT else 1), np.float32)
    offsets = np.empty(places * groups, np.int32)
    if len(sources) <= FEW:
        for t in range(len(tiles)):
            _quantise(
                x,
                tiles[t],
                np.int64(0),
                blocks,
                sources,
                kind,
                zero,
                groups,
                codes,
                scales,
                offsets,
            )
    else:
        # Threads never write to the same line, and read the rows that they have written.
        parts = min(blocks, _PARTS)
        for item in prange(parts * len(tiles)):
            t, part = np.int64(item) // parts, np.int64(item) % parts  # as in decode_attention.py
            first, end = part * blocks // parts, (part + 1) * blocks // parts
            _quantise(x, tiles[t], first, end, sources, kind, zero, groups, codes, scales, offsets)
    panels = (outputs + LANES - 1) // LANES
    step = out.shape[1]
    # Each thread gets the same number of shares of every group.
    for item in prange(shares * len(row_groups)):
        group, share = row_groups[item % len(row_groups)], item // len(row_groups)
        weight = weights + group[0] * nbytes
        first, end = share * panels // shares, (share + 1) * panels // shares
        # Addresses do not keep arrays alive; using the arrays in this loop does.
        codes_at, scales_at, offsets_at = codes.ctypes.data, scales.ctypes.data, offsets.ctypes.data
        out_at = out.ctypes.data
        for t in range(group[1], group[2]):
            row, count, filled, place = tiles[t]
            for panel in range(first, end):
                output = panel * LANES
                to = out_at + 4 * (row * step + column + output)
                lanes = min(LANES, outputs - output)
                call_address(
                    multiply_panel,
                    (
                        filled,
                        weight,
                        panels,
                        panel,
                        bias + group[0] * bias_bytes + 4 * output,
                        codes_at,
                        scales_at,
                        offsets_at,
                        place,
                        blocks,
                        to,
                        step,
                        count,
                        lanes,
                    ),
                )


@cache
def group_products() -> Callee:
    """``multiply_groups``."""
    floats, ids, fields = np.empty((0, 0), np.float32), np.empty(0, np.int64), np.empty((0, 0), int)
    constants = (0,) * 10
    return callee_of(multiply_groups, *constants, floats, ids, fields, fields, floats, 0)


def tile_of(layout: Layout) -> type[Tile]:
    """What emits a layout's products for this CPU."""
    if layout.floats:
        in_pairs = multiplies_pairs() and (moves_bits() or layout.scales == "none")
        return FloatTile if in_pairs else WidenedTile
    if multiplies_lines() and (moves_bits() or not layout.book):
        return Tile
    return NarrowTile if multiplies_half_lines() else ShortTile


def _kind_of(layout: Layout) -> int:
    """The kind of a layout's activations for this CPU."""
    if layout.floats:
        return _ROUNDED if tile_of(layout) is FloatTile else _EXACT
    return _SUMS if layout.adds else _ZEROS


@cache
def compiled(layout: Layout, kind: type[Tile]) -> tuple[int, object]:
    """The function that multiplies a tile with a panel of a layout, and what keeps it valid."""
    multiply_tile = tile_product(layout, kind)  # type: ignore[arg-type]

    def multiply_panel(
        filled: int,
        weight: int,
        panels: int,
        panel: int,
        bias: int,
        codes: int,
        scales: int,
        offsets: int,
        place: int,
        blocks: int,
        out: int,
        step: int,
        count: int,
        lanes: int,
    ) -> None:
        multiply_tile(
            filled,
            weight,
            panels,
            panel,
            bias,
            codes,
            scales,
            offsets,
            place,
            blocks,
            out,
            step,
            count,
            lanes,
        )

    return compile_address(
        multiply_panel,
        14,
        variant=f"{layout} {kind.__name__}",
    )
