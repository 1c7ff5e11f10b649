"""Copies of whole blocks between the KV cache and a buffer, by numpy: ``BlockCopies``."""

from __future__ import annotations

import numpy as np


class NumpyBlockCopies:
    """On any CPU. See ``BlockCopies``."""

    def gather(self, held: np.ndarray, indices: np.ndarray, out: np.ndarray) -> None:
        """See ``BlockCopies``."""
        # In its default mode, numpy takes into a copy first.
        np.take(held, indices, axis=1, out=out, mode="clip")

    def scatter(self, held: np.ndarray, indices: np.ndarray, data: np.ndarray) -> None:
        """See ``BlockCopies``."""
        # numpy moves an item of an opaque type at once, a third faster than an axis of bytes.
        opaque = np.dtype((np.void, held.shape[2]))
        for blocks, arrived in zip(held, data, strict=True):
            np.put(blocks.view(opaque), indices, arrived.view(opaque), mode="clip")
