"""``x @ w.T`` with the weight in panels of ``LANES`` outputs, each read once from end to end.

    x [rows, in] fp32   w [out, in] fp32, bf16 or fp16   ->   [rows, out] fp32

The tile of sums that stays in registers has the shape of FBGEMM's (Khudia et al. 2021, "FBGEMM"). A
row's product is bit-identical in any batch.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numba import prange

from .jit import array, kernel
from .vector import LANES, multiply_tile

# As many rows as fit sixteen registers, with two registers for a row and panel.
_ROWS = 6
# Panels that a thread multiplies at once. Few rows, which leave registers free, are multiplied by
# both together: twice as many sums in flight hide memory latency better.
_STRIP = 2
# The lowest number of rows to pack. Unpacked rows of a tile may all map to the same sets of the L1
# cache.
PACKED = 32
# Inputs of all packed rows that are multiplied at a time: their part of a panel and of a tile fits
# the L1 cache.
_INPUTS = 512
# Panels that packed rows are multiplied by at a time: they fit the L2 cache.
_GROUP = 16


class PackedWeight:
    """A weight [out, in] in panels."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.outputs, inputs = weight.shape
        padded = -(-self.outputs // (_STRIP * LANES)) * _STRIP * LANES
        source = array(weight)
        # numpy's memory is on huge pages.
        self.panels = np.zeros((padded // LANES, inputs, LANES), source.dtype)
        whole, rest = divmod(self.outputs, LANES)
        self.panels[:whole] = source[: whole * LANES].reshape(whole, LANES, inputs).swapaxes(1, 2)
        if rest:
            self.panels[whole, :, :rest] = source[whole * LANES :].T
        self._group = max(1, min(_GROUP, len(self.panels) // (2 * torch.get_num_threads())))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply fp32 rows."""
        rows, panels = len(x), self.panels
        if rows < PACKED:
            out = np.empty((rows, len(panels) * LANES), np.float32)
            multiply_panels(panels, array(x), out)
        else:
            x = F.pad(x, (0, 0, 0, -rows % _ROWS))
            tiles = x.view(-1, _ROWS, x.shape[1]).transpose(1, 2)
            out = np.empty((len(x), len(panels) * LANES), np.float32)
            _multiply_packed(panels, array(tiles).reshape(x.shape), out, self._group)
        return torch.from_numpy(out)[:rows, : self.outputs].contiguous()


@kernel(parallel=True)
def multiply_panels(panels: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    rows = x.shape[0]
    tiles = (rows + _ROWS - 1) // _ROWS
    for strip in prange(len(panels) // _STRIP):
        for tile in range(tiles):
            row, end = tile * rows // tiles, (tile + 1) * rows // tiles
            _tile(panels, strip * _STRIP, x, row, end - row, out)


@kernel(parallel=True)
def _multiply_packed(panels: np.ndarray, x: np.ndarray, out: np.ndarray, group: int) -> None:
    count, inputs = panels.shape[:2]
    for share in prange((count + group - 1) // group):
        for first in range(0, inputs, _INPUTS):
            step = min(_INPUTS, inputs - first)
            for row in range(0, x.shape[0], _ROWS):
                for panel in range(share * group, min(count, (share + 1) * group)):
                    multiply_tile(6, 1, 1, panels, panel, x, row, out, first, step)


@kernel()
def _tile(
    panels: np.ndarray,
    panel: int,
    x: np.ndarray,
    row: int,
    rows: int,
    out: np.ndarray,
) -> None:
    inputs = panels.shape[1]
    # The number of rows is a compile-time constant of a tile.
    if rows == 1:
        multiply_tile(1, 2, 0, panels, panel, x, row, out, 0, inputs)
    elif rows == 2:
        multiply_tile(2, 2, 0, panels, panel, x, row, out, 0, inputs)
    elif rows == 3:
        multiply_tile(3, 2, 0, panels, panel, x, row, out, 0, inputs)
    elif rows == 4:
        for one in range(panel, panel + _STRIP):
            multiply_tile(4, 1, 0, panels, one, x, row, out, 0, inputs)
    elif rows == 5:
        for one in range(panel, panel + _STRIP):
            multiply_tile(5, 1, 0, panels, one, x, row, out, 0, inputs)
    else:
        for one in range(panel, panel + _STRIP):
            multiply_tile(6, 1, 0, panels, one, x, row, out, 0, inputs)
