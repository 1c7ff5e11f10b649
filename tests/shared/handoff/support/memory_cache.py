"""A cache in plain memory, in place of a rank's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tandem.shared.config.kv_dtypes import BYTES
from tandem.shared.handoff.wire.buffer import Buffer
from tandem.shared.kv.copying import Copying, finished
from tandem.shared.kv.layout import KVComponent, LayerLayout
from tandem.tests.shared.handoff.support.fake_driver import as_memory


def _is_elsewhere(buffer: Buffer) -> bool:
    return isinstance(buffer, torch.Tensor) and buffer.device.type != "cpu"


def layer_of(heads: range, head_bytes: int, dtype: str = "bfloat16") -> LayerLayout:
    """K and V of some heads."""
    dim = head_bytes // BYTES[dtype]
    components = tuple(KVComponent(name, dim, dtype) for name in "KV")
    return LayerLayout(components, heads.start, heads.stop)


class MemoryCache:
    """``CachePort`` over one bytearray a layer.

    Each slot of a block keeps the token's row ``[component][head][dim]``; packing transposes it.
    """

    def __init__(
        self,
        layout: Sequence[LayerLayout],
        *,
        num_blocks: int,
        block_size: int,
        kv_dtype: str = "bfloat16",
    ) -> None:
        self.layout = tuple(layout)
        self.kv_dtype = kv_dtype
        self.block_size = block_size
        slots = num_blocks * block_size
        self.layers = [bytearray(slots * layer.token_bytes) for layer in self.layout]

    def row(self, block_table: Sequence[int], token: int, layer: int = 0) -> slice:
        """The place of a token's row in a layer."""
        size = self.layout[layer].token_bytes
        block, slot = block_table[token // self.block_size], token % self.block_size
        start = (block * self.block_size + slot) * size
        return slice(start, start + size)

    def _pieces(self, layer: int, heads: range | None) -> Iterator[tuple[int, int]]:
        """Each component of some heads, by its place in a row and its bytes."""
        layer_heads = self.layout[layer].heads
        chosen_heads = layer_heads if heads is None else heads
        assert set(chosen_heads) <= set(layer_heads)
        first = 0
        for component in self.layout[layer].components:
            for head in chosen_heads:
                yield first + (head - layer_heads.start) * component.bytes, component.bytes
            first += len(layer_heads) * component.bytes

    def _places(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        heads: range | None,
    ) -> Iterator[tuple[slice, slice]]:
        """Pairs of places of the same bytes: in the canonical layout, and in the cache."""
        at = 0
        for place, width in self._pieces(layer, heads):
            for token in range(first_token, end_token):
                start = self.row(block_table, token, layer).start + place
                yield slice(at, at + width), slice(start, start + width)
                at += width

    sums_on_the_way = False

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
        step = len(out) // len(layers)
        for index, layer in enumerate(layers):
            part = out[index * step : (index + 1) * step]
            self.pack(layer, block_table, first_token, end_token, part, heads, dtype)
        return finished()

    def scatter_frame(
        self,
        layers: range,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        data: Buffer,
        heads: range | None = None,
    ) -> Copying:
        step = len(data) // len(layers)
        for index, layer in enumerate(layers):
            part = data[index * step : (index + 1) * step]
            self.scatter(layer, block_table, first_token, end_token, part, heads)
        return finished()

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
            buffer = bytearray(len(out))
            self.pack(layer, block_table, first_token, end_token, buffer, heads, dtype)
            out.copy_(torch.frombuffer(buffer, dtype=torch.uint8))
            return
        out = as_memory(out)
        places = self._places(layer, block_table, first_token, end_token, heads)
        for packed_at, held_at in places:
            out[packed_at] = self.layers[layer][held_at]

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
        places = self._places(layer, block_table, first_token, end_token, heads)
        for packed_at, held_at in places:
            self.layers[layer][held_at] = data[packed_at]
