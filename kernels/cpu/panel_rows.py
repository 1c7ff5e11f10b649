"""Rows of a weight in panels as numbers, for embeddings. With torch, some thirty operators would
take a twentieth of the step of a small model."""

from __future__ import annotations

import numpy as np
import torch

from .block_layouts import BLOCK, SUPER, WORDS, Panels
from .jit import array, kernel
from .vector import widen

# Kinds of scales that are one number each; others share bytes.
_SINGLE = {"fp16", "bf16", "fp32", "int8"}


class PanelRows:
    """Like ``Panels.rows``, which is still used for codes with levels."""

    def __init__(self, panels: Panels) -> None:
        self._panels = panels
        layout, codes = panels.layout, panels.codes
        self._pairs: np.ndarray | None = None
        self._arrays: tuple[np.ndarray, ...] | None = None
        if layout.scales == "none":
            self._pairs = array(codes.view(torch.bfloat16).unflatten(-1, (-1, 2)))
        elif layout.scales in _SINGLE and not (layout.levels or layout.floats or layout.zeros):
            self._arrays = (
                array(codes.view(torch.uint8).unflatten(-1, (-1, 4))),
                np.array(layout.planes, np.int64),
                array(panels.scales),
                array(panels.supers if layout.supers else torch.empty(0, 0, 0, 0)),
            )

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs in fp32 [O, I]."""
        layout = self._panels.layout
        rows = array(outputs)
        out = np.empty((len(rows), self._panels.codes.shape[1] * BLOCK), np.float32)
        if self._pairs is not None:
            _widen(self._pairs, rows, out)
        elif self._arrays is not None:
            _decode(*self._arrays, layout.zero, layout.sharing, rows, out)
        else:
            return self._panels.rows(outputs)
        return torch.from_numpy(out)


@kernel()
def _widen(pairs: np.ndarray, outputs: np.ndarray, out: np.ndarray) -> None:
    """``pairs`` are bf16 [panels, blocks, words, LANES, 2]. Of four neighbours, a word has the
    first and the third, and the next one the others."""
    lanes = pairs.shape[3]
    for row in range(len(outputs)):
        panel = pairs[outputs[row] // lanes, :, :, outputs[row] % lanes]
        for block in range(len(panel)):
            for place in range(BLOCK):
                word, half = place // 4 * 2 + place % 2, place % 4 // 2
                out[row, block * BLOCK + place] = widen(panel[block, word, half])


@kernel(exact=True)
def _decode(
    codes: np.ndarray,
    planes: np.ndarray,
    scales: np.ndarray,
    supers: np.ndarray,
    zero: int,
    sharing: int,
    outputs: np.ndarray,
    out: np.ndarray,
) -> None:
    """``codes`` are the bytes [panels, blocks, lines, LANES, 4], ``scales`` [panels, blocks or
    fewer, groups, scale and minimum, LANES], with factors ``supers`` [panels, super-blocks, scale
    and minimum, LANES], if there are any."""
    lanes, groups, numbers = codes.shape[3], scales.shape[2], scales.shape[3]
    block_codes = np.empty(BLOCK, np.uint8)
    for row in range(len(outputs)):
        panel, lane = outputs[row] // lanes, outputs[row] % lanes
        for block in range(codes.shape[1]):
            block_codes[:] = 0
            first = 0
            for width, position in planes:
                mask = np.uint8((1 << width) - 1)
                for word in range(WORDS):
                    plane = codes[panel, block, first + word % width, lane]
                    right = np.uint8(width * (word // width))
                    for byte in range(4):
                        bits = np.uint8(plane[byte] >> right) & mask
                        block_codes[4 * word + byte] |= np.uint8(bits << np.uint8(position))
                first += width
            for group in range(groups):
                scale = widen(scales[panel, block // sharing, group, 0, lane])
                minimum = np.float32(0)
                if supers.size:
                    scale *= widen(supers[panel, block // SUPER, 0, lane])
                if numbers > 1:
                    minimum = widen(scales[panel, block // sharing, group, 1, lane])
                    if supers.size:
                        minimum *= widen(supers[panel, block // SUPER, 1, lane])
                each = BLOCK // groups
                for code in range(group * each, (group + 1) * each):
                    value = np.float32(np.int32(block_codes[code]) - zero) * scale
                    out[row, block * BLOCK + code] = value + minimum
