"""``x @ w.T`` with the weight in panels of ``LANES`` outputs, each read once from end to end.

    x [rows, in] fp32   w [out, in] fp32, bf16 or fp16   ->   [rows, out] fp32

The tile of sums that stays in registers has the shape of FBGEMM's (Khudia et al. 2021, "FBGEMM").
A row's product is the same, bit for bit, in any batch.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from .jit import array, kernel
from .vector import LANES, multiply_tile

# With two registers a row and panel, as many rows as sixteen registers hold.
_ROWS = 6
# Panels that a thread takes at once. So few rows as to leave registers free are multiplied by both
# together: with twice the sums under way, memory is waited for half as often.
_STRIP = 2
# Inputs that are multiplied by all rows before the next: what they take of a strip fits the first
# cache. A single tile of rows reads the weight in its order instead.
_INPUTS = 512
# Strips that a thread takes together, so that rows are read from the second cache less often.
_GROUP = 2


class Panels:
    """A weight [out, in], packed."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.outputs, inputs = weight.shape
        padded = -(-self.outputs // (_STRIP * LANES)) * _STRIP * LANES
        source = array(weight)
        # numpy's memory lies on huge pages.
        self._panels = np.zeros((padded // LANES, inputs, LANES), source.dtype)
        whole, rest = divmod(self.outputs, LANES)
        self._panels[:whole] = source[: whole * LANES].reshape(whole, LANES, inputs).swapaxes(1, 2)
        if rest:
            self._panels[whole, :, :rest] = source[whole * LANES :].T
        strips = len(self._panels) // _STRIP
        self._group = max(1, min(_GROUP, strips // (2 * torch.get_num_threads())))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product of fp32 rows."""
        panels = self._panels
        out = np.empty((x.shape[0], len(panels) * LANES), np.float32)
        _multiply(panels, array(x), out, self._group)
        whole = torch.from_numpy(out)
        return whole if out.shape[1] == self.outputs else whole[:, : self.outputs].contiguous()


@kernel(parallel=True)
def _multiply(panels: np.ndarray, x: np.ndarray, out: np.ndarray, group: int) -> None:
    strips, inputs, rows = len(panels) // _STRIP, panels.shape[1], x.shape[0]
    tiles = (rows + _ROWS - 1) // _ROWS
    step = inputs if tiles == 1 else _INPUTS
    for share in prange((strips + group - 1) // group):
        for first in range(0, inputs, step):
            count = min(step, inputs - first)
            for tile in range(tiles):
                row, end = tile * rows // tiles, (tile + 1) * rows // tiles
                for strip in range(share * group, min(strips, (share + 1) * group)):
                    _tile(panels, strip * _STRIP, x, row, end - row, out, first, count)


@kernel()
def _tile(
    panels: np.ndarray,
    panel: int,
    x: np.ndarray,
    row: int,
    rows: int,
    out: np.ndarray,
    first: int,
    count: int,
) -> None:
    # The number of rows is part of a tile's code.
    if rows == 1:
        multiply_tile(1, 2, panels, panel, x, row, out, first, count)
    elif rows == 2:
        multiply_tile(2, 2, panels, panel, x, row, out, first, count)
    elif rows == 3:
        multiply_tile(3, 2, panels, panel, x, row, out, first, count)
    elif rows == 4:
        for one in range(panel, panel + _STRIP):
            multiply_tile(4, 1, panels, one, x, row, out, first, count)
    elif rows == 5:
        for one in range(panel, panel + _STRIP):
            multiply_tile(5, 1, panels, one, x, row, out, first, count)
    else:
        for one in range(panel, panel + _STRIP):
            multiply_tile(6, 1, panels, one, x, row, out, first, count)
