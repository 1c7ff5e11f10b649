"""A cache in plain memory, in place of a rank's."""

from __future__ import annotations

from collections.abc import Sequence


class MemoryCache:
    """``CachePort`` over one bytearray a layer.

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
