"""The computed but unsent cells of a transfer, cut into frames."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .coverage import Coverage
from .part_layout import Layout


class CellRange(NamedTuple):
    """A rectangle of cells that travels as one frame. Its layers have the same layout."""

    first_layer: int
    end_layer: int
    first_token: int
    end_token: int

    @property
    def cells(self) -> int:
        return (self.end_layer - self.first_layer) * (self.end_token - self.first_token)


class WorkList:
    """Ready rectangles, first come first served.

    While they wait, consecutive layers with the same tokens and layout are merged, so that a short
    chunk travels in a few full frames; a wide layer is cut by tokens. Cells that were announced
    before are dropped, because a preempted prefill computes its chunks again. So are cells outside
    ``coverage``: outside a layer's window, or in a layer without heads in this part.
    """

    def __init__(self, layout: Layout, coverage: Coverage) -> None:
        self._layout = layout
        self._ready = coverage
        self._ranges: deque[CellRange] = deque()

    @property
    def complete(self) -> bool:
        """True if every cell of the transfer has been announced."""
        return self._ready.complete

    @property
    def empty(self) -> bool:
        return not self._ranges

    def add(self, first_layer: int, end_layer: int, first_token: int, end_token: int) -> None:
        if not 0 <= first_layer < end_layer <= self._ready.num_layers:
            raise ValueError(
                f"layers [{first_layer}, {end_layer}) of a cache with {self._ready.num_layers}"
            )
        for layer in range(first_layer, end_layer):
            for first, end in self._ready.missing(layer, first_token, end_token):
                self._ready.add(layer, layer + 1, first, end)
                self._append(CellRange(layer, layer + 1, first, end))

    def _append(self, piece: CellRange) -> None:
        last = self._ranges[-1] if self._ranges else None
        if (
            last is not None
            and last.end_layer == piece.first_layer
            and (last.first_token, last.end_token) == (piece.first_token, piece.end_token)
            and self._layout[last.first_layer] == self._layout[piece.first_layer]
        ):
            self._ranges[-1] = CellRange(
                last.first_layer, piece.end_layer, piece.first_token, piece.end_token
            )
        else:
            self._ranges.append(piece)

    def peek(self, max_bytes: int) -> CellRange | None:
        """The next range of at most ``max_bytes``, if there is one; ``take`` removes it."""
        if not self._ranges:
            return None
        head = self._ranges[0]
        max_cells = max_bytes // self._layout[head.first_layer].token_bytes
        if not max_cells:
            return None
        tokens = head.end_token - head.first_token
        if tokens <= max_cells:
            end_layer = min(head.end_layer, head.first_layer + max_cells // tokens)
            return CellRange(head.first_layer, end_layer, head.first_token, head.end_token)
        end_token = head.first_token + max_cells
        return CellRange(head.first_layer, head.first_layer + 1, head.first_token, end_token)

    def take(self, piece: CellRange) -> None:
        """Remove the range that ``peek`` returned."""
        head = self._ranges.popleft()
        if piece.end_layer < head.end_layer:
            self._ranges.appendleft(
                CellRange(piece.end_layer, head.end_layer, head.first_token, head.end_token)
            )
        if piece.end_token < head.end_token:
            self._ranges.appendleft(
                CellRange(head.first_layer, piece.end_layer, piece.end_token, head.end_token)
            )
