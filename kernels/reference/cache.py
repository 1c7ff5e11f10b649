"""Writes to the paged KV cache in torch, and copies of its slots and blocks in torch and numpy."""

from __future__ import annotations

import numpy as np
import torch

from ..fp8 import castable, indexable
from ..scaled import CachedKV, ScaledKV, TensorScaledKV, quantize


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
    """Write one component of the step's KV to its slots, in the cache's dtype."""
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


class IndexedCopies:
    """``SlotCopies`` by torch's indexing, on any devices."""

    def gather(
        self, cache_KND: torch.Tensor, slots_T: torch.Tensor, rows_KTD: torch.Tensor
    ) -> None:
        """See ``SlotCopies``."""
        rows_KTD.copy_(indexable(cache_KND)[:, slots_T].view(cache_KND.dtype))

    def scatter(
        self, cache_KND: torch.Tensor, slots_T: torch.Tensor, rows_KTD: torch.Tensor
    ) -> None:
        """See ``SlotCopies``."""
        indexable(cache_KND)[:, slots_T] = indexable(rows_KTD).to(cache_KND.device)


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
