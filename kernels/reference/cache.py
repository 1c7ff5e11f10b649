"""Writes to the paged KV cache in torch, and copies of its slots and blocks in torch and numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..fp8 import castable, indexable
from ..scaled import CachedKV, ScaledKV, TensorScaledKV, quantize
from ..signatures import FrameCells


def write_kv(
    keys_KND: CachedKV,
    values_KND: CachedKV,
    slots_T: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
) -> None:
    """Write the step's K and V to their slots, in the cache's dtype."""
    write_cache(keys_KND, slots_T, k_TKD)
    write_cache(values_KND, slots_T, v_TKD)


def write_cache(cache_KND: CachedKV, slots_T: torch.Tensor, x_TKD: torch.Tensor) -> None:
    """Write one component of the step's KV to its slots, in the cache's dtype. On a GPU, rows with
    a negative slot are padding."""
    if slots_T.device.type != "cpu":
        slots_T, x_TKD = without_padding(slots_T, x_TKD)
    if isinstance(cache_KND, ScaledKV):
        values, scales = quantize(x_TKD)
        cache_KND.values.index_copy_(1, slots_T, values.transpose(0, 1))
        cache_KND.scales.index_copy_(1, slots_T, scales.transpose(0, 1))
        return
    if isinstance(cache_KND, TensorScaledKV):
        x_TKD, cache_KND = cache_KND.encoded(x_TKD), cache_KND.values
    dtype = cache_KND.dtype
    x_KTD = castable(x_TKD, dtype).to(dtype).transpose(0, 1)
    indexable(cache_KND).index_copy_(1, slots_T, indexable(x_KTD))


def without_padding(
    slots_T: torch.Tensor, x_TKD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same number of rows, as a CUDA graph needs: the first one takes the place of padding. If
    that is padding too, as while a graph is captured, slot 0 is written."""
    real = slots_T >= 0
    slots = slots_T.where(real, slots_T[:1]).clamp(min=0)
    return slots, x_TKD.where(real[:, None, None], x_TKD[:1])


class IndexedFrames:
    """``FrameCopies`` by torch's indexing, on any device."""

    sums = False

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], block_size: int) -> None:
        """``layers`` has the components of each layer, [K, N, D]."""
        self._layers = layers
        self._block_size = block_size

    def pack(self, cells: FrameCells, frame: torch.Tensor) -> torch.Tensor | None:
        """See ``FrameCopies``."""
        slots = self._slots(cells)
        for cache_KND, rows_KTD in self._parts(cells, frame):
            rows_KTD.copy_(indexable(cache_KND)[:, slots].view(cache_KND.dtype))
        return None

    def scatter(self, cells: FrameCells, frame: torch.Tensor) -> torch.Tensor | None:
        """See ``FrameCopies``."""
        slots = self._slots(cells)
        for cache_KND, rows_KTD in self._parts(cells, frame):
            indexable(cache_KND)[:, slots] = indexable(rows_KTD)
        return None

    def _parts(
        self, cells: FrameCells, frame: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each component of each layer in the cache and in the frame."""
        heads, at = cells.heads, 0
        for layer in cells.layers:
            for component in self._layers[layer]:
                shape = len(heads), cells.end_token - cells.first_token, component.shape[2]
                end = at + math.prod(shape) * component.element_size()
                rows = frame[at:end].view(component.dtype).view(shape)
                yield component[heads.start : heads.stop], rows
                at = end

    def _slots(self, cells: FrameCells) -> torch.Tensor:
        tokens = torch.arange(cells.first_token, cells.end_token, device=cells.blocks.device)
        blocks = cells.blocks[tokens // self._block_size].long()
        return blocks * self._block_size + tokens % self._block_size


class NumpyBlockCopies:
    """``BlockCopies`` by numpy, on any CPU."""

    def gather(self, cached: np.ndarray, indices: np.ndarray, out: np.ndarray) -> None:
        """See ``BlockCopies``."""
        # In its default mode, numpy takes into a temporary first.
        np.take(cached, indices, axis=1, out=out, mode="clip")

    def scatter(self, cached: np.ndarray, indices: np.ndarray, data: np.ndarray) -> None:
        """See ``BlockCopies``."""
        # numpy moves an item of an opaque type as a whole, a third faster than an axis of bytes.
        opaque = np.dtype((np.void, cached.shape[2]))
        for blocks, arrived in zip(cached, data, strict=True):
            np.put(blocks.view(opaque), indices, arrived.view(opaque), mode="clip")
