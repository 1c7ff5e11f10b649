"""The data plane's interface to a rank's KV cache.

The plane's own thread is the only caller. It does not know the block size or the tensor's layout:
tokens are named by their index in the sequence, heads by their number in the whole model, and bytes
are always canonical, ``[layer][side][head][token][dim]``: of some of this rank's heads, or of all
if ``heads`` is omitted. The sides are K and V, or one latent that both are computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..wire.buffer import Buffer


class CachePort(Protocol):
    """One rank's slice of the KV cache, seen from its data plane.

    Both methods must have finished with ``out``, ``data`` and the blocks when they return: the
    plane reuses the buffer at once, and the head may free the blocks on the next event. A layer is
    packed only after it was announced, and on a GPU after it is computed (see ``computing.py``).
    ``block_table[i]`` holds the tokens ``[i * block_size, (i + 1) * block_size)``.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def sides(self) -> tuple[str, ...]:
        """The parts of each layer's KV, by name, in the order of the bytes."""

    @property
    def layer_bytes_per_token(self) -> int:
        """Bytes of all sides of this rank's heads for one token in one layer."""

    def pack(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        out: Buffer,
        heads: range | None = None,
        dtype: str | None = None,
    ) -> None:
        """Write ``[side][head][token][dim]`` of the tokens to ``out``, which has exactly their size
        in ``dtype`` (the cache's own by default)."""

    def scatter(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        data: Buffer,
        heads: range | None = None,
    ) -> None:
        """Read ``[side][head][token][dim]`` of the tokens from ``data`` into the blocks."""
