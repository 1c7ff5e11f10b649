"""The data plane's interface to a rank's KV cache.

The plane's own thread is the only caller. It does not know the block size or the tensor's layout:
tokens are named by their index in the sequence, heads by their number in the whole model, and bytes
are always canonical (``layout.py`` in ``shared/kv``): of some of this rank's heads, or of all if
``heads`` is omitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...kv.layout import LayerLayout
from ..wire.buffer import Buffer


class CachePort(Protocol):
    """One rank's slice of the KV cache, seen from its data plane.

    Both methods must have finished with ``out``, ``data`` and the blocks when they return: the
    plane reuses the buffer at once, and the head may free the blocks on the next event. A layer is
    packed only after it was announced, and on a GPU after it is computed (see ``computing.py``).
    ``block_table[i]`` holds the tokens ``[i * block_size, (i + 1) * block_size)``.
    """

    @property
    def kv_dtype(self) -> str:
        """The dtype that KV is cached in."""

    @property
    def layout(self) -> tuple[LayerLayout, ...]:
        """What each layer keeps of a token, of this rank's heads."""

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
        exactly their size in ``dtype`` (the cache's own by default). ``whole_scales``: of each
        component in fp8; 1 by default."""

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
