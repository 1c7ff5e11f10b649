"""The data plane's interface to a rank's KV cache.

The plane's own thread is the only caller. It does not know the block size or the tensors' layout:
tokens are numbered within the sequence, heads within the whole model, and bytes are always
canonical (``layout.py`` in ``shared/kv``). Without ``heads``, all heads of this rank are meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...kv.layout import LayerLayout
from ..wire.buffer import Buffer


class CachePort(Protocol):
    """One rank's slice of the KV cache, for its data plane.

    Both methods must have finished with ``out``, ``data`` and the blocks when they return: the
    plane reuses the buffer at once, and the head may free the blocks on the next event. A layer is
    packed only after it is announced, and on a GPU after it is computed (``computed_layers.py``).
    ``block_table[i]`` holds the tokens ``[i * block_size, (i + 1) * block_size)``.
    """

    @property
    def kv_dtype(self) -> str:
        """The dtype of cached KV."""

    @property
    def layout(self) -> tuple[LayerLayout, ...]:
        """The layout of each layer for this rank's heads."""

    def pack(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        out: Buffer,
        heads: range | None = None,
        dtype: str | None = None,
        whole_scales: Sequence[float] = (),
    ) -> None:
        """Write the components of the tokens, each as ``[head][token][dim]``, to ``out``, which has
        exactly their size in ``dtype`` (by default the cache's own). ``whole_scales`` are the
        scales of the components in fp8, 1 by default."""

    def scatter(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        data: Buffer,
        heads: range | None = None,
    ) -> None:
        """Read the components of the tokens from ``data`` into the blocks."""
