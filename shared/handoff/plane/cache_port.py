"""The data plane's interface to a rank's KV cache.

The plane's own thread is the only caller. It does not know the block size or the tensors' layout:
tokens are numbered within the sequence, heads within the whole model, and bytes are always
canonical (``layout.py`` in ``shared/kv``). Without ``heads``, all heads of this rank are meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...kv.copying import Copying
from ...kv.layout import LayerLayout
from ..wire.buffer import Buffer


class CachePort(Protocol):
    """One rank's slice of the KV cache, for its data plane.

    A frame has the cells of consecutive layers with the same layout. ``out`` and the blocks are in
    use until the copy is over, ``data`` too if it is in a device's memory; what is launched in one
    thread is done in its order. A layer is packed only after it is announced, and on a GPU after it
    is computed (``computed_layers.py``).
    ``block_table[i]`` holds the tokens ``[i * block_size, (i + 1) * block_size)``.
    """

    @property
    def kv_dtype(self) -> str:
        """The dtype of cached KV."""

    @property
    def layout(self) -> tuple[LayerLayout, ...]:
        """The layout of each layer for this rank's heads."""

    @property
    def sums_on_the_way(self) -> bool:
        """True if frames in a device's memory are summed while they are copied."""

    def pack_frame(
        self,
        layers: range,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        out: Buffer,
        heads: range | None = None,
        dtype: str | None = None,
        whole_scales: Sequence[float] = (),
    ) -> Copying:
        """Begin to write the components of the tokens, each as ``[head][token][dim]``, to ``out``,
        which has exactly their size in ``dtype`` (by default the cache's own). ``whole_scales`` are
        the scales of the layers' components in fp8, 1 by default."""

    def scatter_frame(
        self,
        layers: range,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        data: Buffer,
        heads: range | None = None,
    ) -> Copying:
        """Begin to read the components of the tokens from ``data`` into the blocks."""
