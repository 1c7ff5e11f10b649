"""A cache in plain memory, in place of a rank's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.shared.handoff.wire.buffer import Buffer

from .fake_driver import as_memory


def _is_elsewhere(buffer: Buffer) -> bool:
    return isinstance(buffer, torch.Tensor) and buffer.device.type != "cpu"


class MemoryCache:
    """``CachePort`` over one bytearray a layer.

    Each slot of a block keeps the token's row ``[K|V][head][dim]``; packing transposes it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_bytes: int,
        first_head: int = 0,
    ) -> None:
        self.num_layers = num_layers
        self.block_size = block_size
        self.heads = range(first_head, first_head + num_heads)
        self.head_bytes = head_bytes
        self.sides = ("K", "V")
        self.layer_bytes_per_token = 2 * num_heads * head_bytes
        size = num_blocks * block_size * self.layer_bytes_per_token
        self.layers = [bytearray(size) for _ in range(num_layers)]

    def row(self, block_table: Sequence[int], token: int) -> slice:
        """Where a token's row lies in a layer."""
        block, slot = block_table[token // self.block_size], token % self.block_size
        start = (block * self.block_size + slot) * self.layer_bytes_per_token
        return slice(start, start + self.layer_bytes_per_token)

    def _planes(self, heads: range | None) -> list[int]:
        """K and V of some heads, by their places in a row."""
        wanted = self.heads if heads is None else heads
        assert set(wanted) <= set(self.heads)
        local = [head - self.heads.start for head in wanted]
        return local + [len(self.heads) + head for head in local]

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
        if _is_elsewhere(out):
            packed = bytearray(len(out))
            self.pack(layer, block_table, first_token, end_token, packed, heads, dtype)
            out.copy_(torch.frombuffer(packed, dtype=torch.uint8))
            return
        out = as_memory(out)
        count, width = end_token - first_token, self.head_bytes
        planes = self._planes(heads)
        for index in range(count):
            row = self.layers[layer][self.row(block_table, first_token + index)]
            for number, plane in enumerate(planes):
                at = (number * count + index) * width
                out[at : at + width] = row[plane * width : (plane + 1) * width]

    def scatter(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        data: Buffer,
        heads: range | None = None,
    ) -> None:
        data = as_memory(data.cpu() if _is_elsewhere(data) else data)
        count, width = end_token - first_token, self.head_bytes
        planes = self._planes(heads)
        for index in range(count):
            start = self.row(block_table, first_token + index).start
            for number, plane in enumerate(planes):
                at = (number * count + index) * width
                into = start + plane * width
                self.layers[layer][into : into + width] = data[at : at + width]
