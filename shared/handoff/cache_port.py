"""What the data plane needs of a rank's KV cache, and an in-memory cache for tests.

The plane's own thread is the only caller. It never learns the block size or the tensor's layout:
tokens are named by their index in the sequence, and bytes are always canonical,
``[layer][K|V][head][token][dim]``, for the heads of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class CachePort(Protocol):
    """One rank's slice of the KV cache, seen from its data plane.

    Both methods must have finished with ``out``, ``data`` and the blocks when they return: the
    plane reuses the buffer at once, and the head may free the blocks on the next event. ``pack``
    must also wait until a layer that was announced as computed really is (a stream event on GPUs).
    ``block_table[i]`` holds the tokens ``[i * block_size, (i + 1) * block_size)``.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def layer_bytes_per_token(self) -> int:
        """Bytes of K and V of this rank's heads for one token in one layer."""

    def pack(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        out: memoryview,
    ) -> None:
        """Write ``[K|V][head][token][dim]`` of the tokens to ``out``, which has just their size."""

    def scatter(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        data: memoryview,
    ) -> None:
        """Read ``[K|V][head][token][dim]`` of the tokens from ``data`` into the blocks."""


class MemoryCache:
    """The port over one bytearray a layer; the model for tests, and for nodes without a model.

    Each slot of a block keeps the token's row ``[K|V][head][dim]``; packing transposes it.
    """

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_heads: int, head_bytes: int
    ) -> None:
        self.num_layers = num_layers
        self.block_size = block_size
        self.num_heads = num_heads
        self.head_bytes = head_bytes
        self.layer_bytes_per_token = 2 * num_heads * head_bytes
        size = num_blocks * block_size * self.layer_bytes_per_token
        self.layers = [bytearray(size) for _ in range(num_layers)]

    def row(self, block_table: Sequence[int], token: int) -> slice:
        """Where a token's row lies in a layer."""
        block, slot = block_table[token // self.block_size], token % self.block_size
        start = (block * self.block_size + slot) * self.layer_bytes_per_token
        return slice(start, start + self.layer_bytes_per_token)

    def pack(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        out: memoryview,
    ) -> None:
        count, width = end_token - first_token, self.head_bytes
        for index in range(count):
            row = self.layers[layer][self.row(block_table, first_token + index)]
            for plane in range(2 * self.num_heads):
                at = (plane * count + index) * width
                out[at : at + width] = row[plane * width : (plane + 1) * width]

    def scatter(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        data: memoryview,
    ) -> None:
        count, width = end_token - first_token, self.head_bytes
        for index in range(count):
            start = self.row(block_table, first_token + index).start
            for plane in range(2 * self.num_heads):
                at = (plane * count + index) * width
                into = start + plane * width
                self.layers[layer][into : into + width] = data[at : at + width]
