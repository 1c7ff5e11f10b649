"""Frames of the handoff by Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..reference.cache import IndexedFrames
from ..row_sums import WORD
from ..signatures import FrameCells
from . import frame_copy

Layers = Sequence[Sequence[torch.Tensor]]
# Words of a token of each component.
Widths = tuple[int, ...]


class TritonFrames(IndexedFrames):
    """``FrameCopies`` by Triton, in two launches: zeros for the sums, and the copy."""

    sums = True

    def __init__(self, layers: Layers, block_size: int) -> None:
        super().__init__(layers, block_size)
        self._widths = [widths_of(components) for components in layers]
        self._cache_slots = layers[0][0].shape[1]
        pitch = max(len(components) for components in layers)
        addresses = [
            [each.data_ptr() for each in components] + [0] * (pitch - len(components))
            for components in layers
        ]
        device = layers[0][0].device
        self._pointers_LC = torch.tensor(addresses, dtype=torch.int64).to(device)

    def pack(self, cells: FrameCells, frame: torch.Tensor) -> torch.Tensor | None:
        """See ``FrameCopies``."""
        return self._copy(cells, frame, scatter=False)

    def scatter(self, cells: FrameCells, frame: torch.Tensor) -> torch.Tensor | None:
        """See ``FrameCopies``."""
        return self._copy(cells, frame, scatter=True)

    def _copy(
        self, cells: FrameCells, frame: torch.Tensor, *, scatter: bool
    ) -> torch.Tensor | None:
        if not frame_copy.takes(frame):  # a part of a frame whose layers differ
            return super().scatter(cells, frame) if scatter else super().pack(cells, frame)
        return frame_copy.copy_frame(
            self._pointers_LC,
            self._widths[cells.layers.start],
            self._cache_slots,
            self._block_size,
            cells,
            frame,
            scatter=scatter,
        )


def widths_of(components: Sequence[torch.Tensor]) -> Widths:
    """Raises ``ValueError`` for tokens that are not whole words."""
    sizes = [each.shape[2] * each.element_size() for each in components]
    if any(size % WORD for size in sizes):
        raise ValueError(f"tokens of {sizes} bytes, not of whole words")
    return tuple(size // WORD for size in sizes)
