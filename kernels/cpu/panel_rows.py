"""Rows of a weight in panels as numbers: embeddings. torch's operators, some thirty of them, take a
twentieth of the step of a small model."""

from __future__ import annotations

import numpy as np
import torch

from .block_layouts import BLOCK, WORDS, Panels
from .jit import array, kernel


def rows_of(panels: Panels, outputs: torch.Tensor) -> torch.Tensor:
    """As ``Panels.rows``, which is used for codes that stand for other numbers."""
    layout = panels.layout
    if layout.levels or layout.floats or layout.zeros:
        return panels.rows(outputs)
    scales, minimums = panels.row_scales(outputs)
    codes = panels.codes.view(torch.uint8).unflatten(-1, (-1, 4))
    out = torch.empty(len(outputs), codes.shape[1] * BLOCK)
    _decode(
        array(codes),
        array(outputs),
        np.array(layout.planes, np.int64),
        layout.zero,
        layout.group,
        array(scales),
        array(scales.new_empty(0, 0) if minimums is None else minimums),
        array(out),
    )
    return out


@kernel(exact=True)
def _decode(
    codes: np.ndarray,
    outputs: np.ndarray,
    planes: np.ndarray,
    zero: int,
    group: int,
    scales: np.ndarray,
    minimums: np.ndarray,
    out: np.ndarray,
) -> None:
    """``codes`` are the bytes [panels, blocks, lines, LANES, 4]."""
    lanes = codes.shape[3]
    found = np.empty(BLOCK, np.uint8)
    for row in range(len(outputs)):
        panel = codes[outputs[row] // lanes, :, :, outputs[row] % lanes]
        for block in range(len(panel)):
            found[:] = 0
            first = 0
            for width, position in planes:
                mask = np.uint8((1 << width) - 1)
                for word in range(WORDS):
                    plane = panel[block, first + word % width]
                    right = np.uint8(width * (word // width))
                    for byte in range(4):
                        bits = np.uint8(plane[byte] >> right) & mask
                        found[4 * word + byte] |= np.uint8(bits << np.uint8(position))
                first += width
            begin = block * BLOCK
            for code in range(BLOCK):
                at = begin + code
                value = np.float32(np.int32(found[code]) - zero) * scales[row, at // group]
                if len(minimums):
                    value += minimums[row, at // group]
                out[row, at] = value
